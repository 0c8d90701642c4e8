"""EAGLE heads for tests, and their slow twin: the head's passes over a whole text, without a cache, written down from the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_heads import plain_hidden, write_heads
from torch import Tensor

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    "hidden_size": 256, "vocab_size": 2048,
}  # fmt: skip
"""A head's config.json as EAGLE's authors publish it, for gpt2-tiny. Its context is shorter than the target's, as theirs are."""


def random_head(config: dict[str, Any], seed: int = 0, scale: float = 0.05) -> dict[str, Tensor]:
    """Weights of its layers and of fc."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {"fc.weight": (hidden, 2 * hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, size in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "post_attention_layernorm": (hidden,), **({"input_layernorm": (hidden,)} if layer else {}),
        }.items():  # fmt: skip
            sizes[f"layers.{layer}.{name}.weight"] = size
    found = {name: torch.randn(size, generator=generator) * scale for name, size in sizes.items()}
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in found.items()}


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    return write_heads(folder, tensors, SMALL | config)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _turned(x: Tensor, theta: float) -> Tensor:
    """x [num_tokens, num_heads, head_dim]: pairs (i, i + half) as complex numbers, turned by their position."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def plain_states(config: dict[str, Any], tensors: dict[str, Tensor], features: Tensor, embedded: Tensor) -> Tensor:
    """What a head makes of a text: features [num_tokens, hidden_size] of its positions, and the embeddings of the tokens after them."""
    num_heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    x = F.linear(torch.cat((embedded, features), -1), tensors["fc.weight"], tensors.get("fc.bias"))
    for layer in range(config["num_hidden_layers"]):
        of = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in tensors.items()}
        normed = _norm(x, of["input_layernorm.weight"], eps) if layer else x
        query, key, value = (
            F.linear(normed, of[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, config["hidden_size"] // num_heads))
            for name in "qkv"
        )  # fmt: skip
        query, key = _turned(query, config["rope_theta"]), _turned(key, config["rope_theta"])
        key, value = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = x + F.linear(mixed, of["self_attn.o_proj.weight"])
        normed = _norm(x, of["post_attention_layernorm.weight"], eps)
        wide = F.silu(F.linear(normed, of["mlp.gate_proj.weight"])) * F.linear(normed, of["mlp.up_proj.weight"])
        x = x + F.linear(wide, of["mlp.down_proj.weight"])
    return x


@torch.inference_mode()
def plain_drafts(
    config: dict[str, Any], tensors: dict[str, Tensor], model: Any, hidden: Tensor, known: list[int], count: int
) -> list[int]:
    """The tokens that a head guesses after `known`: the whole text again for each of them. `hidden`: the target's states of a text that begins so."""
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    features, tokens = hidden[: len(known) - 1], known[1:]
    for _ in range(count):
        states = plain_states(config, tensors, features, table[torch.tensor(tokens)])
        features = torch.cat((features, states[-1:]))
        tokens = [*tokens, int(model.get_output_embeddings()(states[-1]).argmax())]
    return tokens[len(known) - 1 :]


@torch.inference_mode()
def fitted_head(config: dict[str, Any], model: Any, texts: list[list[int]]) -> dict[str, Tensor]:
    """A head that is right now and then: a layer that does little, and an fc fitted to the hidden states of these texts (least squares)."""
    tensors = random_head(config, scale=0.01)
    hidden, table = [plain_hidden(model, text) for text in texts], model.get_input_embeddings().weight
    inputs = torch.cat([torch.cat((table[torch.tensor(text[1:])], of[:-1]), -1) for text, of in zip(texts, hidden)])
    wanted = torch.cat([of[1:] for of in hidden])
    gram = inputs.T @ inputs + 0.1 * torch.eye(inputs.shape[1])
    return tensors | {"fc.weight": torch.linalg.solve(gram, inputs.T @ wanted).T}
