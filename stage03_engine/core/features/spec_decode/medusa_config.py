"""`--speculative-config '{"method": "medusa", ...}'`: the heads' config.json, and whether they fit the target (vllm/transformers_utils/configs/medusa.py (0.11))."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stage03_engine.core.features.spec_decode.draft_model_config import KEYS, context, parse_drafter
from stage03_engine.core.features.spec_decode.manifest import keys_of, refused
from stage03_engine.errors import ModelNotFoundError
from stage03_engine.hf_config import Config
from stage03_engine.model_path import canonical_name, has_model, locate, weight_files

if TYPE_CHECKING:
    from stage03_engine.model_path import ModelFiles

MAX_HEADS = 128  # the most drafts, too


def parse_medusa(given: dict[str, Any], values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig. Raises ConfigError that names the key, or says why the heads do not fit, and
    ModelNotFoundError."""
    given = keys_of(given, KEYS)
    fields = parse_drafter(given)
    dummy = values["load_format"] == "dummy"
    try:
        whole = _has_config if dummy else partial(has_model, "auto")
        settings = SimpleNamespace(**{**values, "revision": None})  # the target's own revision is not the heads'
        folder, _ = locate(canonical_name(given["model"]), "model", whole, dummy, settings)
        if not _has_config(folder):
            raise ModelNotFoundError(f"{folder} is not a model: it has no config.json")
        if not dummy:
            weight_files(folder)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config: {error}") from error
    heads = read_heads(Config(folder / "config.json"), files)
    if fields["num_speculative_tokens"] > heads["num_heads"]:
        raise refused(
            "num_speculative_tokens", f"must be at most {heads['num_heads']}, a token for each head", fields["num_speculative_tokens"]
        )  # fmt: skip
    return fields | {
        "method": "medusa",
        "draft_model_path": str(folder),
        "draft_load_format": "dummy" if dummy else "auto",
        "draft_max_model_len": context(given, files.shape.max_position_embeddings, "the target's context"),
        "draft_heads": heads,
    }


def read_heads(config: Config, target: ModelFiles) -> dict[str, Any]:
    """The sizes of MedusaHeads. The checkpoints' makers call two of them by other names. Raises ConfigError."""
    shape = target.shape
    for key, wanted in (("hidden_size", shape.hidden_size), ("vocab_size", shape.vocab_size)):
        if (found := config.size(key, wanted)) != wanted:
            config.refuse(f"{key} is {found}, and the target's {wanted}: these heads are another model's")
    num_heads = config.size("num_heads", config.size("medusa_num_heads", 5))
    num_layers = config.size("num_hidden_layers", config.size("medusa_num_layers", 1))
    if max(num_heads, num_layers) > MAX_HEADS:
        config.refuse(f"{num_heads} heads of {num_layers} layers are more than {MAX_HEADS}")
    kept = config.size("truncated_vocab_size", shape.vocab_size)
    if kept > shape.vocab_size:
        config.refuse(f"truncated_vocab_size {kept} is more than vocab_size {shape.vocab_size}")
    scale = config.values.get("logit_scale", 1.0)
    if type(scale) not in (int, float) or not 0 < scale < 1e6:
        config.refuse(f"logit_scale must be a number above 0, not {scale!r}")
    return {
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "bias": config.flag("medusa_fc_bias", False),
        "one_output_matrix": config.flag("original_lm_head", False),
        "kept_vocab_size": kept,
        "logit_scale": float(scale),
    }


def num_parameters(heads: Mapping[str, Any]) -> int:
    """Of heads with these sizes."""
    hidden, bias = heads["hidden_size"], heads["hidden_size"] if heads["bias"] else 0
    matrices = 1 if heads["one_output_matrix"] else heads["num_heads"]
    blocks = heads["num_heads"] * heads["num_layers"] * (hidden * hidden + bias)
    return int(blocks + matrices * heads["kept_vocab_size"] * hidden)


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()
