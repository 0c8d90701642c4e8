"""`--speculative-config '{"method": "medusa", ...}'`: the heads' config.json, and whether they fit the target (vllm/transformers_utils/configs/medusa.py (0.11))."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stage03_engine.core.features.spec_decode.heads_files import Shapes, Tensors, num_parameters, parse_heads
from stage03_engine.core.features.spec_decode.manifest import refused
from stage03_engine.hf_config import Config

if TYPE_CHECKING:
    from stage03_engine.core.features.spec_decode.manifest import SpeculativeConfig
    from stage03_engine.model_path import ModelFiles

MAX_HEADS = 128  # the most drafts, too


def parse_medusa(given: dict[str, Any], values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig. Raises as `parse_heads` does."""
    fields = parse_heads(given, values, files, own_name, read_heads)
    count, most = fields["num_speculative_tokens"], fields["draft_heads"]["num_heads"]
    if count > most:
        raise refused("num_speculative_tokens", f"must be at most {most}, a token for each head", count)
    return fields | {"method": "medusa"}


def read_heads(config: Config, target: ModelFiles, found: Tensors) -> tuple[dict[str, Any], Shapes]:
    """The sizes of MedusaHeads. The checkpoints' makers call two of them by other names. Raises ConfigError."""
    vocab = target.shape.vocab_size
    num_heads = config.size("num_heads", config.size("medusa_num_heads", 5))
    num_layers = config.size("num_hidden_layers", config.size("medusa_num_layers", 1))
    if max(num_heads, num_layers) > MAX_HEADS:
        config.refuse(f"{num_heads} heads of {num_layers} layers are more than {MAX_HEADS}")
    kept = config.size("truncated_vocab_size", vocab)
    if kept > vocab:
        config.refuse(f"truncated_vocab_size {kept} is more than vocab_size {vocab}")
    if kept == vocab:
        found.pop("token_map", None)
    elif found and "token_map" not in found:
        config.refuse("the heads have a truncated_vocab_size, and no token_map says which tokens these are")
    sizes = {
        "hidden_size": target.shape.hidden_size,
        "vocab_size": vocab,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "bias": config.flag("medusa_fc_bias", False),
        "one_output_matrix": config.flag("original_lm_head", False),
        "kept_vocab_size": kept,
    }
    return {"draft_heads": sizes}, tensors_of(sizes)


def own_name(name: str) -> str:
    """A checkpoint's name -> the heads': their makers put "medusa_heads." before it."""
    return name.removeprefix("medusa_heads.")


def tensors_of(heads: Mapping[str, Any]) -> Shapes:
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


def plan(own: SpeculativeConfig) -> tuple[str, int, str]:
    """Their row in the plan of the memory: name, numbers, how they are made up."""
    heads = own.draft_heads or {}
    return "medusa_heads", num_parameters(tensors_of(heads)), f"{heads['num_heads']} heads"
