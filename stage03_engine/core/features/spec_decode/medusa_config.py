"""`--speculative-config '{"method": "medusa", ...}'`: the heads' config.json, and whether they fit the target (vllm/transformers_utils/configs/medusa.py (0.11))."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stage03_engine.core.features.spec_decode.draft_model_config import KEYS, context, parse_drafter
from stage03_engine.core.features.spec_decode.heads_files import check_tensors, find_heads, tensors_in
from stage03_engine.core.features.spec_decode.manifest import keys_of, refused
from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import Config

if TYPE_CHECKING:
    from stage03_engine.core.features.spec_decode.manifest import SpeculativeConfig
    from stage03_engine.model_path import ModelFiles

MAX_HEADS = 128  # the most drafts, too
NO_MAP = "the heads have a truncated_vocab_size, and no token_map says which tokens these are"


def parse_medusa(given: dict[str, Any], values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig. Raises ConfigError that names the key, or says why the heads do not fit, and
    ModelNotFoundError."""
    given = keys_of(given, KEYS)
    fields = parse_drafter(given)
    folder, dummy = find_heads(given["model"], values), values["load_format"] == "dummy"
    heads = read_heads(Config(folder / "config.json"), files)
    if fields["num_speculative_tokens"] > heads["num_heads"]:
        raise refused(
            "num_speculative_tokens", f"must be at most {heads['num_heads']}, a token for each head", fields["num_speculative_tokens"]
        )  # fmt: skip
    if not dummy:
        found = {own_name(name): each for name, each in tensors_in(folder).items()}
        if heads["kept_vocab_size"] == heads["vocab_size"]:
            found.pop("token_map", None)
        elif "token_map" not in found:
            raise ConfigError(f"speculative_config: {folder}: {NO_MAP}")
        check_tensors(folder, found, tensors_of(heads))
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


def own_name(name: str) -> str:
    """A checkpoint's name -> the heads': their makers put "medusa_heads." before it."""
    return name.removeprefix("medusa_heads.")


def tensors_of(heads: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Name -> the shapes that it may have, of all that a checkpoint of such heads holds: an output matrix may have rows of tokens that the heads do not know."""
    hidden, vocab, kept = heads["hidden_size"], heads["vocab_size"], heads["kept_vocab_size"]
    found: dict[str, list[list[int]]] = {} if kept == vocab else {"token_map": [[kept]]}
    for head in range(heads["num_heads"]):
        for layer in range(heads["num_layers"]):
            block = f"blocks.{head}.layers.{layer}"
            found |= {f"{block}.weight": [[hidden, hidden]]} | ({f"{block}.bias": [[hidden]]} if heads["bias"] else {})
    sizes = [[kept, hidden]] if kept == vocab else [[kept, hidden], [vocab, hidden]]
    return found | {
        f"lm_heads.{number}.weight": sizes for number in range(1 if heads["one_output_matrix"] else heads["num_heads"])
    }


def num_parameters(heads: Mapping[str, Any]) -> int:
    """Of heads with these sizes, as they are held."""
    return sum(math.prod(sizes[0]) for name, sizes in tensors_of(heads).items() if name != "token_map")


def plan(own: SpeculativeConfig) -> tuple[str, int, str]:
    """Their row in the plan of the memory: name, numbers, how they are made up."""
    heads = own.draft_heads or {}
    return "medusa_heads", num_parameters(heads), f"{heads['num_heads']} heads"
