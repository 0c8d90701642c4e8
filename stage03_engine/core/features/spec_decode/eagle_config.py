"""`--speculative-config '{"method": "eagle", ...}'`: the head's config.json and tensors, and whether they fit the target (vllm/transformers_utils/configs/eagle.py).

Published heads have the config.json of a Llama with one layer (`LlamaForCausalLM`); vLLM writes `"model_type": "eagle"`, and may wrap the Llama in `"model"`. Both are
read. For a GPT-2, which nobody has published a head for, it is the same: a Llama's layer of the target's width, over the target's token embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from msgspec import convert

from stage03_engine.core.features.spec_decode.heads_files import Shapes, Tensors, num_parameters, parse_heads
from stage03_engine.hf_config import Config
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import wanted

if TYPE_CHECKING:
    from stage03_engine.core.features.spec_decode.manifest import SpeculativeConfig
    from stage03_engine.model_path import ModelFiles

MAX_LAYERS = 8  # of a head: all that are published have one
ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "EAGLEModel")
_FIXED: dict[str, tuple[Any, ...]] = {
    "add_para_norm": (False,),  # HASS: norms before fc
    "qkv_bias": (False,),
    "truncated_vocab_size": (None,),
    "speculators_model_type": (),  # another layout, with other names
}
"""Keys that change the mathematics of a head, and the values that are supported."""


def parse_eagle(given: dict[str, Any], values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig. Raises as `parse_heads` does."""
    return parse_heads(given, values, files, own_name, read_head) | {"method": "eagle", "block_hash_lookahead": 1}


def read_head(config: Config, target: ModelFiles, found: Tensors) -> tuple[dict[str, Any], Shapes]:
    """The shape of the head's layers, and which parts it has beside them. Raises ConfigError."""
    if isinstance(inner := config.values.get("model"), dict):
        config.values = inner | {key: value for key, value in config.values.items() if key != "model"}
    config.only(_FIXED)
    if not isinstance(named := config.values.get("architectures") or [], list):
        config.refuse(f"architectures is {named!r}, not a list")
    for architecture in named:
        if architecture not in ARCHITECTURES:
            config.refuse(
                f"architecture {architecture} is not supported for a head; supported: {', '.join(ARCHITECTURES)}"
            )
    reader = wanted("architecture", "LlamaForCausalLM", "what reads the shape of a Llama, an EAGLE head's layer,")
    shape: ModelShape = replace(reader(config, "LlamaForCausalLM"), architecture="EagleLlamaForCausalLM")
    if shape.num_layers > MAX_LAYERS:
        config.refuse(f"{shape.num_layers} layers are more than {MAX_LAYERS}: this is a model and no head")
    parts = {"bias": config.flag("bias", "fc.bias" in found), "own_embedding": "embed_tokens.weight" in found}
    return {"draft_shape": asdict(shape), "draft_heads": dict(parts)}, tensors_of(shape, **parts)


def own_name(name: str) -> str | None:
    """A checkpoint's name -> the head's; None for what it does not need: tables that are computed, and an output matrix, which is the target's."""
    name = name.removeprefix("model.")
    return None if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq") else name


def tensors_of(shape: ModelShape, bias: bool, own_embedding: bool) -> Shapes:
    """Name -> shape of all that a head of this form has. Layer 0 has no norm before its attention: `fc` mixes what was normed."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found = {"fc.weight": [hidden, 2 * hidden]}
    if bias:
        found["fc.bias"] = [hidden]
    if own_embedding:
        found["embed_tokens.weight"] = [shape.vocab_size, hidden]
    for number in range(shape.num_layers):
        layer = f"layers.{number}."
        for name, size, with_bias in (
            ("q_proj", [queries, hidden], shape.attention_bias), ("k_proj", [keys, hidden], shape.attention_bias),
            ("v_proj", [keys, hidden], shape.attention_bias), ("o_proj", [hidden, queries], shape.attention_output_bias),
        ):  # fmt: skip
            found[f"{layer}self_attn.{name}.weight"] = size
            if with_bias:
                found[f"{layer}self_attn.{name}.bias"] = size[:1]
        found |= {f"{layer}mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
        found |= {f"{layer}mlp.down_proj.weight": [hidden, inner], f"{layer}post_attention_layernorm.weight": [hidden]}
        if number:
            found[f"{layer}input_layernorm.weight"] = [hidden]
    return {name: [size] for name, size in found.items()}


def plan(own: SpeculativeConfig) -> tuple[str, int, str]:
    """Its row in the plan of the memory: name, numbers, how they are made up."""
    head, shape = own.draft_heads or {}, convert(own.draft_shape, ModelShape)
    how = f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)}" + ", and an embedding" * head["own_embedding"]
    return "eagle_head", num_parameters(tensors_of(shape, head["bias"], head["own_embedding"])), how
