"""`--runner`, `--convert` and `--pooler-config` (vllm/config/model.py, pooler.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError
from stage03_engine.params.pooling_params import POOLING_TYPES
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.model_path import ModelFiles

_OLD_NAMES = {"seq_pooling_type": "pooling_type", "normalize": "use_activation"}
"""Keys that vLLM knows under two names."""
KEYS = ("pooling_type", "use_activation", "dimensions")


@dataclass(frozen=True)
class PoolingConfig:
    """Whether the engine makes text or vectors. `runner_type` "pooling": vectors; a vector may hold a number per class."""

    runner: str = option(
        "auto",
        "what the engine makes of prompts: generate = text, pooling = vectors or classes; auto = text, unless --convert or the "
        "model say otherwise",
        ("auto", "generate", "pooling", "draft"),
    )  # fmt: skip
    convert: str = option(
        "auto",
        "embed = use the hidden states of any model as embeddings; classify = use its classification head, score.weight, "
        "whatever config.json calls the model",
        ("auto", "none", "embed", "classify"),
    )  # fmt: skip
    pooler_config: dict[str, Any] | None = option(
        None,
        'how hidden states become vectors, as JSON: {"pooling_type": "MEAN", "use_activation": true, "dimensions": 64}; '
        "LAST, scaled to length 1, and all dimensions if not given",
    )
    runner_type: str = internal("generate")
    convert_type: str = internal("none")  # with runner_type "pooling": embed or classify
    pooling_type: str = internal("LAST")
    use_activation: bool = internal(True)
    dimensions: int | None = internal(None)
    is_matryoshka: bool = internal(False)  # the first numbers of a vector, however many, are a vector too
    matryoshka_dimensions: tuple[int, ...] | None = internal(None)  # or only so many of them


@dataclass(frozen=True)
class PoolingFlags:
    """Part of VllmConfig."""

    pooling_config: PoolingConfig = PoolingConfig()

    @property
    def is_pooling(self) -> bool:
        """True if requests end with vectors and not with text."""
        return self.pooling_config.runner_type == "pooling"

    @property
    def is_classifier(self) -> bool:
        """True if these vectors classify a text."""
        return self.is_pooling and self.pooling_config.convert_type == "classify"

    @staticmethod
    def tasks(config: VllmConfig) -> tuple[str, ...]:
        """The tasks of an embedding model or a classifier; none for a model that generates."""
        if not config.is_classifier:
            return ("embed", "token_embed", "score") if config.is_pooling else ()
        # With one class its probability is a score: the model is a cross-encoder.
        return ("classify", "token_classify", *(("score",) if len(config.shape.labels) == 1 else ()))

    @staticmethod
    def resolve(values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
        """How the engine pools, whether its vectors can be cut, and the labels if it classifies."""
        runner, convert, pooler = (values[name] for name in ("runner", "convert", "pooler_config"))
        computed = parse_pooling(runner, convert, pooler, has_head=bool(getattr(files.shape, "labels", ())))
        if computed["convert_type"] == "classify":
            from stage03_engine.core.features.pooling.labels import classifier_shape

            computed["shape"] = classifier_shape(files.shape, files.model_path, SimpleNamespace(**values))
        if computed["runner_type"] == "pooling" and files.model_path is not None:
            computed |= parse_matryoshka(Path(files.model_path) / "config.json", SimpleNamespace(**values))
        return computed

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for dimensions that the vectors cannot have."""
        size, hidden_size = config.pooling_config.dimensions, config.shape.hidden_size
        if size is not None and size > hidden_size:
            raise ConfigError(f"pooler_config: dimensions {size} is more than the model's hidden size, {hidden_size}")
        if size is not None and config.is_classifier:
            raise ConfigError(
                "pooler_config: dimensions cuts embeddings; a classifier answers with one number per class"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner pools hidden states instead of sampling."""
        if not config.is_pooling:
            return {}
        return {
            "scheduler": ["stage03_engine.core.features.pooling.hooks:PoolingSchedulerHook"],
            "runner": ["stage03_engine.core.features.pooling.hooks:PoolingRunnerHook"],
        }


def parse_pooling(runner: str, convert: str, given: dict[str, Any] | None, has_head: bool = False) -> dict[str, Any]:
    """The computed fields of PoolingConfig. `has_head`: the model has a classification head instead of an output matrix.

    Raises ConfigError that names the setting or the key.
    """
    if runner == "draft":
        raise ConfigError("runner draft is not built; see --help for what is")
    if runner == "generate" and has_head:
        raise ConfigError("runner generate needs a model that writes text; this one has a classification head instead")
    if runner == "generate" and convert in ("embed", "classify"):
        raise ConfigError(f"convert {convert} needs runner pooling (or auto), not generate")
    if convert == "none" and (runner == "pooling" or has_head):
        raise ConfigError(
            "runner pooling needs convert embed or classify (or auto): the models here are made to generate"
        )
    pooling = runner == "pooling" or convert in ("embed", "classify") or has_head
    if given is not None and not pooling:
        raise ConfigError("pooler_config needs runner pooling")
    values, converted = _checked(given or {}), "classify" if has_head else "embed"
    return {
        "runner_type": "pooling" if pooling else "generate",
        "convert_type": (converted if convert == "auto" else convert) if pooling else "none",
        "pooling_type": values.get("pooling_type", "LAST"),
        "use_activation": values.get("use_activation", True),
        "dimensions": values.get("dimensions"),
    }


def parse_matryoshka(path: Path, settings: object) -> dict[str, Any]:
    """What config.json says about cutting vectors: `is_matryoshka`, or the sizes, `matryoshka_dimensions`. Only a model trained
    for it keeps the meaning of a vector in its first numbers (Kusupati et al. 2022). `settings` are all of them. Raises ConfigError."""
    from stage03_engine.hf_config import Config  # not while the settings are put together

    config = Config(path, settings).values
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError(f"{path}: matryoshka_dimensions must be a list of positive integers")
    is_matryoshka = bool(sizes) or config.get("is_matryoshka") is True
    return {"is_matryoshka": is_matryoshka, "matryoshka_dimensions": tuple(sizes) or None}


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    check_keys("pooler_config", given, KEYS + tuple(_OLD_NAMES))
    for key, value in given.items():
        name = _OLD_NAMES.get(key, key)
        if name in values:
            raise ConfigError(f"pooler_config: {name} is given twice")
        values[name] = value.upper() if name == "pooling_type" and isinstance(value, str) else value
    if values.get("pooling_type", "LAST") not in POOLING_TYPES:
        kinds = ", ".join(POOLING_TYPES)
        raise ConfigError(f"pooler_config: pooling_type must be one of {kinds}, not {values['pooling_type']!r}")
    if type(values.get("use_activation", True)) is not bool:
        raise ConfigError(f"pooler_config: use_activation must be true or false, not {values['use_activation']!r}")
    size = values.get("dimensions")
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"pooler_config: dimensions must be a positive integer, not {size!r}")
    return values


_CLASSIFIERS = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3")


def _classifier(name: str) -> tuple[Part, Part]:
    architecture, kind = f"{name}ForSequenceClassification", "GPT2" if name == "GPT2" else "Llama"
    return (
        Part("architecture", ".labels:read_classifier", key=architecture, model_type=name.lower()),
        Part("model", f".classification:{kind}ForSequenceClassification", key=architecture),
    )


FEATURE = Feature(
    name="pooling",
    help="vectors and classes instead of text",
    room=__package__,
    also=(
        "stage03_engine.params.pooling_params",
        "stage03_engine.frontend.features.pooling_inputs",
    ),
    settings={"VllmConfig": PoolingFlags},
    parts=(
        *(part for name in _CLASSIFIERS for part in _classifier(name)),
        Part("llm", "stage03_engine.frontend.features.pooling_inputs:encode", key="encode"),
        Part("replay", ".recorded_pooling:RecordedPoolingHook", key="pooling"),
    ),
    needs=("model_formats",),
    events=("pooler.classified", "sched.pooled"),
)
