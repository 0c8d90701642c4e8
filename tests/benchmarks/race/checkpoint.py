"""A GPT-2 with random weights and a tokenizer, as a folder that every engine reads: no download."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from race.workloads import Scale

SEED = 0
END = "<|endoftext|>"


def make_checkpoint(folder: Path, scale: Scale) -> Path:
    """Write `folder` unless it is there already, config.json last: a torn one is written again."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_weights(scale), folder / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(folder, scale)
        (folder / "config.json").write_text(json.dumps(_config(scale), indent=2), encoding="utf-8")
    return folder


def _config(scale: Scale) -> dict[str, object]:
    end = scale.vocab_size - 1
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "vocab_size": scale.vocab_size, "n_positions": scale.positions, "n_ctx": scale.positions,
        "n_embd": scale.hidden_size, "n_layer": scale.layers, "n_head": scale.heads, "layer_norm_epsilon": 1e-5,
        "bos_token_id": end, "eos_token_id": end, "torch_dtype": "float32",
    }  # fmt: skip


def _weights(scale: Scale) -> dict[str, np.ndarray]:
    """GPT-2's initialization, so that activations have the size that they have in a model before its training."""
    rng = np.random.default_rng(SEED)
    width = scale.hidden_size

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}

    def linear(name: str, inputs: int, outputs: int, std: float = 0.02) -> dict[str, np.ndarray]:
        return {f"{name}.weight": normal(inputs, outputs, std=std), f"{name}.bias": np.zeros(outputs, np.float32)}

    weights = {"wte.weight": normal(scale.vocab_size, width), "wpe.weight": normal(scale.positions, width)}
    residual = 0.02 / (2 * scale.layers) ** 0.5  # of the projections back into the residual stream
    for layer in (f"h.{index}" for index in range(scale.layers)):
        weights |= norm(f"{layer}.ln_1") | norm(f"{layer}.ln_2")
        weights |= linear(f"{layer}.attn.c_attn", width, 3 * width)
        weights |= linear(f"{layer}.attn.c_proj", width, width, residual)
        weights |= linear(f"{layer}.mlp.c_fc", width, 4 * width)
        weights |= linear(f"{layer}.mlp.c_proj", 4 * width, width, residual)
    weights |= norm("ln_f")
    return {f"transformer.{name}": tensor for name, tensor in weights.items()}


def _write_tokenizer(folder: Path, scale: Scale) -> None:
    """Byte-level BPE with one merge (llama.cpp refuses none): bytes, made-up words of four letters, which is about what a
    token of GPT-2 has, and the end of text as the last id."""
    rng = random.Random(SEED)
    words = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt"])
    while len(words) < scale.vocab_size - 1:
        words["Ġ" + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4))] = None
    vocab = {word: index for index, word in enumerate([*words, END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": scale.positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
