"""A GPT-2 that ends what it has begun: under any grammar it writes a short answer, so agents get one from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from small_gpt2 import first_layers
from tokenizers import Tokenizer

LIKED = ['"', "]", "}", ",", "1", "a", "."]
"""Tokens, the likeliest first: what closes, then what must come before something can close. After a quote, the end of the text is likelier."""


def closing_model(folder: Path, max_model_len: int = 4096) -> str:
    """Write the model into `folder`, which must not exist: the tokenizer of gpt2-tiny, one layer, and nearly the same logits
    after any text. Returns its path."""
    first_layers(folder, 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": max_model_len}))
    tensors = load_file(folder / "model.safetensors")
    names = {name.removeprefix("transformer."): name for name in tensors}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = torch.zeros_like(tensors[names["wte.weight"]])  # [vocab_size, hidden_size], tied to the logits
    for place, token in enumerate(LIKED):
        table[tokenizer.token_to_id(token), 0] = 40.0 - place
    table[tokenizer.token_to_id('"'), 1], table[config["eos_token_id"], 1] = 40.0, 60.0
    table[:, 2] = -table[:, 0] - table[:, 1]  # the norm takes away the mean, which is 0 so
    first, second = torch.eye(table.shape[1], dtype=table.dtype)[:2]
    tensors |= {
        names["wte.weight"]: table, names["wpe.weight"]: torch.zeros(max_model_len, table.shape[1], dtype=table.dtype),
        names["ln_f.weight"]: second, names["ln_f.bias"]: first,  # what follows column 0 for any text, plus column 1 after a quote
    }  # fmt: skip
    tensors |= {
        name: torch.zeros_like(tensor) for name, tensor in tensors.items() if ".c_proj." in name
    }  # a block adds nothing
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
