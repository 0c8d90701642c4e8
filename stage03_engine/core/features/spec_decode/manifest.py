"""`--speculative-config`: one JSON object, checked key by key (vllm/config, SpeculativeConfig)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


NGRAM_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_ROOM = "stage03_engine.core.features.spec_decode."
DRAFT_MODEL = _ROOM + "draft_model_config:"
READERS = {
    "draft_model": DRAFT_MODEL + "parse_draft_model", "medusa": _ROOM + "medusa_config:parse_medusa",
    "eagle": _ROOM + "eagle_config:parse_eagle",
}  # fmt: skip
"""Method -> what reads the keys of its JSON."""
NOT_BUILT = {
    "eagle3": "a head on hidden states from the middle of the target, which the models here do not hand out",
    "mlp_speculator": "a head on the target's last hidden state",
    "mtp": "layers of the target's own that predict further tokens", "suffix": "a tree of all that was written before",
    "ngram_gpu": "prompt lookup on the device",
}  # fmt: skip
"""vLLM's other methods, and what each drafts with."""
DEFAULT_LOOKUP = 5  # vLLM's, when neither bound is given
MAX_VALUE = 128  # of each number: longer drafts are useless, and every draft position costs a row of logits

RUNNER_HOOKS = {
    "ngram": "ngram_proposer:NgramHook", "draft_model": "draft_model:DraftModelHook", "medusa": "medusa:MedusaHook",
    "eagle": "eagle:EagleHook",
}  # fmt: skip

COUNTS = {
    "spec_decode_num_drafts": "Steps in which a request had drafts.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos{position}": "Draft tokens that were accepted, by their place among a request's drafts.",
}
"""Metric, perhaps with a label -> what it counts."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: guess tokens and verify several in one step. `method` None means off."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4}, or with a smaller model that drafts: {"model": "gpt2-tiny-draft", "num_speculative_tokens": 4}, or with '
        'Medusa heads or an EAGLE head of the target: {"method": "medusa", "model": "FOLDER", "num_speculative_tokens": 4}; '
        "off if not given",
        aliases=("-sc",),
    )
    method: str | None = internal(None)
    num_speculative_tokens: int = internal(0)
    prompt_lookup_min: int = internal(0)
    prompt_lookup_max: int = internal(0)
    # Of the model, or the heads, that draft:
    draft_model_path: str | None = internal(None)
    draft_load_format: str = internal("auto")
    draft_shape: dict[str, Any] | None = internal(
        None
    )  # a ModelShape, which consists of what manifests like this one add
    draft_max_model_len: int = internal(0)
    draft_sample_method: str = internal("coupled")
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = internal(())
    adaptive_num_speculative_tokens: bool = internal(True)
    draft_heads: dict[str, Any] | None = internal(
        None
    )  # what medusa.py makes MedusaHeads of, and eagle.py an EagleHead


@dataclass(frozen=True)
class SpecDecodeFlags:
    """Part of VllmConfig."""

    speculative_config: SpeculativeConfig = SpeculativeConfig()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """What the JSON says, key by key; of a model that drafts, its files too."""
        given = values["speculative_config"]
        if given is not None and (reader := READERS.get(method_of(given, values))) is not None:
            found: dict[str, Any] = load(reader)(given, values, files)
            return found
        return parse_speculative_config(given)

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if the model generates nothing, the tokens would depend on the batch, or a model that drafts has no place."""
        own = config.speculative_config
        method = own.method
        if method is not None and "generate" not in config.supported_tasks:
            raise ConfigError(
                "runner pooling generates nothing, so there is nothing to speculate; leave out one of the two"
            )
        if (
            method is not None
            and own.draft_sample_method == "probabilistic"
            and getattr(config.device_config, "batch_invariant", False)
        ):
            raise ConfigError(
                "speculative_config: draft_sample_method probabilistic cannot be combined with batch_invariant: a token depends on whether it was "
                "drafted, and that on the other requests; coupled and greedy leave all tokens alone"
            )
        if method == "draft_model":
            load(DRAFT_MODEL + "check_draft_model")(config)
        if own.draft_shape is not None:
            load(DRAFT_MODEL + "check_own_blocks")(config)

    @staticmethod
    def kv_per_token(config: VllmConfig) -> int:
        """Numbers in the keys and values of the model, or the head, that drafts, which lie in the same blocks."""
        shape = config.speculative_config.draft_shape
        return (
            0
            if shape is None or not SpecDecodeFlags.hooks(config)
            else 2 * int(shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"])
        )

    @staticmethod
    def memory_rows(config: VllmConfig) -> list[tuple[str, int, str, bool]]:
        """Heads. A model that drafts counts among the weights."""
        own = config.speculative_config
        if own.draft_heads is None or not SpecDecodeFlags.hooks(config):
            return []
        name, count, how = load(f"{_ROOM}{own.method}_config:plan")(own)
        item_bytes = load("stage03_engine.core.kv_cache_size:item_bytes")
        return [(name, count * item_bytes(config), f"{how} (speculative_config)", True)]

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner proposes drafts, the scheduler makes room for them. Not together with custom logits processors: they
        may look at the tokens before a position, which for a draft are not certain."""
        method = config.speculative_config.method
        if method is None or getattr(config.model_config, "logits_processors", None):
            return {}
        return {"scheduler": [_ROOM + "draft_scheduler:DraftHook"], "runner": [_ROOM + RUNNER_HOOKS[method]]}


def method_of(given: dict[str, Any], values: Mapping[str, Any]) -> str:
    """Without one, it follows from the model, as in vLLM; "" if there is none either. Raises ConfigError for a method that is not built."""
    method = given.get("method")
    if method is None and given.get("model") is not None:
        method = load(_ROOM + "heads_files:method_of_files")(given, values)
    if type(method) is str and method in NOT_BUILT:
        built = ", ".join(map(repr, RUNNER_HOOKS))
        raise ConfigError(
            f"speculative_config: method {method!r} ({NOT_BUILT[method]}) is not built; built are {built}"
        )
    if method is None:
        return ""
    if type(method) is not str or method not in RUNNER_HOOKS:
        raise refused("method", f"must be one of {', '.join(RUNNER_HOOKS)}", method)
    return method


def parse_speculative_config(given: dict[str, Any] | None) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig for n-grams; none if it is off. Of the two lookup lengths, a missing one takes the value
    of the other. Raises ConfigError that names the key."""
    if given is None:
        return {}
    given = keys_of(given, NGRAM_KEYS)
    if given.get("method") != "ngram":
        raise ConfigError("speculative_config: give a method ('ngram'), or a model that drafts")
    count = positive("num_speculative_tokens", given.get("num_speculative_tokens"))
    low = given.get("prompt_lookup_min", given.get("prompt_lookup_max", DEFAULT_LOOKUP))
    shortest = positive("prompt_lookup_min" if "prompt_lookup_min" in given else "prompt_lookup_max", low)
    longest = positive("prompt_lookup_max", given.get("prompt_lookup_max", shortest))
    if shortest > longest:
        raise ConfigError(f"speculative_config: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return {
        "method": "ngram",
        "num_speculative_tokens": count,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


def keys_of(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What is given: null is as good as nothing, as in vLLM. Raises ConfigError that names a key that is not `known`."""
    check_keys("speculative_config", given, known)
    return {key: value for key, value in given.items() if value is not None}


def positive(key: str, value: Any) -> int:
    """A number of tokens. Raises ConfigError that names the key."""
    if type(value) is not int or not 1 <= value <= MAX_VALUE:  # not isinstance: True is no number here
        raise refused(key, f"must be an integer in [1, {MAX_VALUE}]", value)
    return value


def refused(key: str, rule: str, value: object, why: str = "") -> ConfigError:
    """One line about a key's value, however long that is."""
    reason = f": {why}" if why else ""
    return ConfigError(f"speculative_config: {key} {rule}, not {repr(value)[:100]}{reason}")


FEATURE = Feature(
    name="spec_decode",
    help="speculative decoding: n-grams of the request's own text, or what a smaller model or heads guess, checked in one step",
    room=__package__,
    also=("stage04_kernels.features.rejection_sampler",),
    settings={"VllmConfig": SpecDecodeFlags},
    parts=(
        Part("replay", ".recorded_drafts:RecordedDraftHook", key="spec.proposed"),
        Part("counts", ".manifest:COUNTS"),
    ),
    after=("swap_space",),  # blocks that come back hold keys that a draft reads
    events=("spec.proposed", "spec.drafted", "spec.caught_up", "spec.scheduled", "spec.verified"),
)
