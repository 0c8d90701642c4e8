"""Find a model's files by name, and read its shape (vllm/transformers_utils/config.py and repo_utils.py).

Order: a folder, the bundled models, the Hugging Face cache, the Hugging Face hub. Imports neither torch nor
transformers, and huggingface_hub only when a name is neither a folder nor bundled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage03_engine.args.parser import did_you_mean
from stage03_engine.config import ModelShape
from stage03_engine.errors import ConfigError, ModelNotFoundError

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
SUPPORTED_ARCHITECTURES = ("GPT2LMHeadModel",)
_HUB_TIMEOUT_S = 3.0  # for the first answer of the hub; an unreachable one must not hold a command for long
_TOKENIZER_FILES = ["tokenizer*", "vocab.json", "merges.txt"]
_MODEL_FILES = ["config.json", *_TOKENIZER_FILES, "*.safetensors*"]
_ALIASES = {"gpt-2": "gpt2"}
_HUB_REASONS = {
    "RepositoryNotFoundError": "the hub has no such model",
    "HFValidationError": "the hub cannot have a model of that name",
    "GatedRepoError": "the hub gives it only to those who were granted access (HF_TOKEN)",
}


def _gpt2(num_layers: int, num_heads: int, hidden_size: int) -> ModelShape:
    return ModelShape(
        "GPT2LMHeadModel", 50257, num_layers, num_heads, num_heads, hidden_size // num_heads, hidden_size,
        4 * hidden_size, 1024, eos_token_id=50256,
    )  # fmt: skip


KNOWN_SHAPES = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
}
"""Shapes that `--load-format dummy` knows without any file. Source: table 2 of the GPT-2 paper (Radford et al. 2019)."""


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found."""

    name: str  # without alias
    model_path: str | None  # folder with config.json; None for a known shape
    tokenizer_path: str | None  # folder with tokenizer files; None only with dummy weights
    shape: ModelShape
    where: str  # folder, bundled, cache, hub or known shape


def canonical_name(name: str) -> str:
    """`gpt-2` -> `gpt2`; every other name is its own."""
    return _ALIASES.get(name, name)


def bundled_models() -> list[str]:
    """Names of the models that come with the project."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))


def resolve_model(name: str, load_format: str = "auto", tokenizer: str | None = None) -> ModelFiles:
    """Find the model `name`, its tokenizer and its shape.

    With load_format "dummy" no weights are needed, a known shape will do, and the hub is not asked; a model without
    tokenizer files then has tokenizer_path None. `tokenizer` names another folder or model to take the tokenizer from.
    Raises ModelNotFoundError when files are missing, ConfigError for a config.json that cannot be used.
    """
    name, dummy = canonical_name(name), load_format == "dummy"
    tokenizer_path = _find_tokenizer(tokenizer, dummy) if tokenizer is not None else None
    if dummy and name in KNOWN_SHAPES and not Path(name).is_dir():
        return ModelFiles(name, None, tokenizer_path, KNOWN_SHAPES[name], "known shape")
    folder, where = _find(name, "model", _MODEL_FILES, _has_config if dummy else _has_model, offline=dummy)
    if not _has_config(folder):
        raise ModelNotFoundError(f"{folder} is not a model: it has no config.json")
    shape = read_shape(folder)
    if not dummy:
        _check_weights(folder)
    if tokenizer_path is None and _has_tokenizer(folder):
        tokenizer_path = str(folder)
    if tokenizer_path is None and not dummy:
        raise ModelNotFoundError(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); name one with --tokenizer"
        )
    return ModelFiles(name, str(folder), tokenizer_path, shape, where)


def _find_tokenizer(name: str, offline: bool) -> str:
    folder, _ = _find(canonical_name(name), "tokenizer", _TOKENIZER_FILES, _has_tokenizer, offline=offline)
    if not _has_tokenizer(folder):
        raise ModelNotFoundError(f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt")
    return str(folder)


def _find(
    name: str, what: str, patterns: list[str], complete: Callable[[Path], bool], *, offline: bool
) -> tuple[Path, str]:
    """The folder of `name` and where it was found. A folder that the user names is taken even when it is incomplete, so
    that the error is about that folder; a cached one is only taken when it is complete."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path.resolve(), "folder"
    if name in bundled_models():
        return BUNDLED_FOLDER / name, "bundled"
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"no {what} at {name!r}: {'it is a file' if path.exists() else 'no such folder'}")
    cached = _from_cache(name, patterns)
    if cached is not None and complete(cached):
        return cached, "cache"
    if offline:
        raise _not_found(name, what, "--load-format dummy does not ask the hub")
    return _from_hub(name, what, patterns), "hub"


def _from_cache(name: str, patterns: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (OSError, ValueError):  # not cached, or not a name that the hub could have
        return None


def _from_hub(name: str, what: str, patterns: list[str]) -> Path:
    """Download `name` into the Hugging Face cache. Honours HF_HUB_OFFLINE, HF_ENDPOINT and HF_HOME."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise _not_found(name, what, "HF_HUB_OFFLINE forbids to ask the hub")
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)  # fails early: snapshot_download waits longer, and tries again
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # which classes these are differs between the versions of huggingface_hub
        kind = type(error).__name__
        reason = _HUB_REASONS.get(kind, f"the hub cannot be reached, or refuses ({kind})")
        raise _not_found(name, what, reason) from None


def _not_found(name: str, what: str, reason: str) -> ModelNotFoundError:
    suggestion = "" if name in KNOWN_SHAPES else did_you_mean(name, [*bundled_models(), *KNOWN_SHAPES])
    return ModelNotFoundError(
        f"{what} {name!r} is neither a folder, nor bundled, nor in the Hugging Face cache, and {reason}{suggestion}; "
        "what works without a download: gpt2-tiny (bundled), or random weights with --load-format dummy for "
        + ", ".join(KNOWN_SHAPES)
    )


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_tokenizer(folder: Path) -> bool:
    if (folder / "tokenizer.json").is_file():
        return True
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def _has_model(folder: Path) -> bool:
    return _has_config(folder) and any(folder.glob("*.safetensors"))


def _check_weights(folder: Path) -> None:
    """Weights are `*.safetensors`; where an index lists shards, all of them. Raises ModelNotFoundError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if not (folder / str(shard)).is_file())
        if missing:
            raise ModelNotFoundError(f"weights are missing in {folder}: {', '.join(missing)}")
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"no weights in {folder}: it holds no *.safetensors file; --load-format dummy serves it with random weights"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Keys that change GPT-2's mathematics, and the values that are built: any other would give wrong tokens silently."""


def read_shape(folder: str | os.PathLike[str]) -> ModelShape:
    """The shape in a GPT-2 `config.json`. Raises ConfigError that names the file and the key."""
    path = Path(folder) / "config.json"
    config = _read_json(path)
    architectures = config.get("architectures") or (
        SUPPORTED_ARCHITECTURES if config.get("model_type") == "gpt2" else []
    )
    architecture = str(architectures[0]) if isinstance(architectures, (list, tuple)) and architectures else "none"
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"{path}: architecture {architecture} is not supported; supported: {supported}")
    for key, allowed in _FIXED.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"{path}: {key} = {config[key]!r} is not supported; only {allowed[0]!r} is")
    hidden_size, num_heads = _size(config, path, "n_embd"), _size(config, path, "n_head")
    context_key = "n_ctx" if "n_positions" not in config and "n_ctx" in config else "n_positions"
    if hidden_size % num_heads:
        raise ConfigError(f"{path}: n_embd = {hidden_size} is not a multiple of n_head = {num_heads}")
    return ModelShape(
        architecture=architecture,
        vocab_size=_size(config, path, "vocab_size"),
        num_layers=_size(config, path, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size if config.get("n_inner") is None else _size(config, path, "n_inner"),
        max_position_embeddings=_size(config, path, context_key),
        layer_norm_epsilon=_epsilon(config, path),
        torch_dtype=_dtype(config, path),
        eos_token_id=_eos(config, path),
    )


def _size(config: dict[str, Any], path: Path, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value < 2**31:
        raise ConfigError(f"{path}: {key} must be a positive integer, not {value!r}")
    return value


def _epsilon(config: dict[str, Any], path: Path) -> float:
    value = config.get("layer_norm_epsilon", 1e-5)
    if type(value) is not float or not 0 < value < 1:
        raise ConfigError(f"{path}: layer_norm_epsilon must be a number between 0 and 1, not {value!r}")
    return value


def _dtype(config: dict[str, Any], path: Path) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in ("float32", "float16", "bfloat16"):
        raise ConfigError(f"{path}: number format {value!r} is not supported; float32, float16 and bfloat16 are")
    return value


def _eos(config: dict[str, Any], path: Path) -> int | None:
    value = config.get("eos_token_id")
    if value is not None and type(value) is not int:
        raise ConfigError(f"{path}: eos_token_id must be an integer, not {value!r}")
    return value
