"""Adapters with random pairs, in PEFT's form, and the models that they would be merged into."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GPT2_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LLAMA_LAYERS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{n}_proj" for n in ("gate", "up", "down")
)


def linear_layers(model: Path) -> dict[str, tuple[str, bool]]:
    """PEFT's name of each linear layer -> (the name of its weight in the checkpoint, is it stored transposed)."""
    names = load_file(model / "model.safetensors").keys()
    gpt2 = any(".c_attn." in name for name in names)
    ends, found = tuple(f"{layer}.weight" for layer in (GPT2_LAYERS if gpt2 else LLAMA_LAYERS)), {}
    for name in names:
        if name.endswith(ends):
            whole = name if name.startswith(("transformer.", "model.")) else f"transformer.{name}"
            found[whole.removesuffix(".weight")] = (name, gpt2)
    return found


def write_adapter(
    folder: Path,
    model: Path,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    only: str = "",
    strength: float = 0.3,
    **config: Any,
) -> str:
    """`only`: a part of the names of the layers that it changes. Returns its path."""
    folder.mkdir()
    weights, generator, tensors = load_file(model / "model.safetensors"), torch.Generator().manual_seed(seed), {}
    for layer, (name, transposed) in linear_layers(model).items():
        if only in layer:
            outputs, inputs = weights[name].T.shape if transposed else weights[name].shape
            a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            b = torch.randn(outputs, rank, generator=generator) * strength / math.sqrt(rank)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": ["x"],
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(own | config))
    return str(folder)


def merge(folder: Path, model: Path, adapter: Path) -> str:
    """Write the model with W + scale * B A in the place of each W. Returns its path."""
    shutil.copytree(model, folder, copy_function=shutil.copy)
    weights, pairs = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for layer, (name, transposed) in linear_layers(model).items():
        if (a := pairs.get(f"base_model.model.{layer}.lora_A.weight")) is not None:
            change = scale * (pairs[f"base_model.model.{layer}.lora_B.weight"] @ a)
            weights[name] = (weights[name] + (change.T if transposed else change)).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
