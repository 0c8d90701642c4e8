"""`--speculative-config '{"method": "eagle", ...}'`: the head's config.json and tensors, and whether they fit the target (vllm/transformers_utils/configs/eagle.py).

Published heads have the config.json of a Llama with one layer (`LlamaForCausalLM`); vLLM writes `"model_type": "eagle"`, and may wrap the Llama in `"model"`. Both are
read. For a GPT-2, which nobody has published a head for, it is the same: a Llama's layer of the target's width, over the target's token embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from msgspec import convert

from stage03_engine.core.features.spec_decode.draft_model_config import KEYS, context, parse_drafter
from stage03_engine.core.features.spec_decode.heads_files import check_tensors, find_heads, tensors_in
from stage03_engine.core.features.spec_decode.manifest import keys_of
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
    """The internal fields of SpeculativeConfig. Raises ConfigError that names the key, or says why the head does not fit, and
    ModelNotFoundError."""
    given = keys_of(given, KEYS)
    fields = parse_drafter(given)
    folder = find_heads(given["model"], values)
    config = Config(folder / "config.json")
    shape = read_head(config, files)
    dummy = values["load_format"] == "dummy"
    found = (
        {} if dummy else {own_name(name) or name: each for name, each in tensors_in(folder).items() if own_name(name)}
    )
    scale = config.values.get("logit_scale", 1.0)
    if type(scale) not in (int, float) or not 0 < scale < 1e6:
        config.refuse(f"logit_scale must be a number above 0, not {scale!r}")
    more = {"bias": config.flag("bias", "fc.bias" in found), "own_embedding": "embed_tokens.weight" in found}
    if not dummy:
        check_tensors(folder, found, {name: [each] for name, each in tensors_of(shape, **more).items()})
    return fields | {
        "method": "eagle",
        "draft_model_path": str(folder),
        "draft_load_format": "dummy" if dummy else "auto",
        "draft_shape": asdict(shape),
        # a head counts positions as the target does: whatever it was trained up to, it is asked beyond
        "draft_max_model_len": context(given, files.shape.max_position_embeddings, "the target's context"),
        "draft_heads": {**more, "logit_scale": float(scale)},
        "block_hash_lookahead": 1,
    }


def read_head(config: Config, target: ModelFiles) -> ModelShape:
    """The shape of the head's layers. Raises ConfigError."""
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
    for key, own in (("hidden_size", target.shape.hidden_size), ("vocab_size", target.shape.vocab_size)):
        if (found := config.size(key, own)) != own:
            config.refuse(f"{key} is {found}, and the target's {own}: this head is another model's")
    reader = wanted("architecture", "LlamaForCausalLM", "what reads the shape of a Llama, an EAGLE head's layer,")
    shape: ModelShape = reader(config, "LlamaForCausalLM")
    if shape.num_layers > MAX_LAYERS:
        config.refuse(f"{shape.num_layers} layers are more than {MAX_LAYERS}: this is a model and no head")
    return replace(shape, architecture="EagleLlamaForCausalLM")


def own_name(name: str) -> str | None:
    """A checkpoint's name -> the head's; None for what it does not need: tables that are computed, and an output matrix, which is the target's."""
    name = name.removeprefix("model.")
    return None if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq") else name


def tensors_of(shape: ModelShape, bias: bool, own_embedding: bool) -> dict[str, list[int]]:
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
    return found


def plan(own: SpeculativeConfig) -> tuple[str, int, str]:
    """Its row in the plan of the memory: name, numbers, how they are made up."""
    head, shape = own.draft_heads or {}, convert(own.draft_shape, ModelShape)
    count = sum(math.prod(size) for size in tensors_of(shape, head["bias"], head["own_embedding"]).values())
    return (
        "eagle_head",
        count,
        f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)}" + ", and an embedding" * head["own_embedding"],
    )
