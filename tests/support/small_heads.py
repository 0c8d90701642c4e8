"""What the tests of every kind of heads share: the folder that they lie in, and the hidden states that they guess from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_heads(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """A checkpoint. A key of the config.json that is None is left out."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    known = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(known))
    return str(folder)


def plain_hidden(model: Any, token_ids: list[int]) -> Tensor:
    """transformers' last hidden states of these tokens, [num_tokens, hidden_size], from one pass without a cache."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([token_ids])).last_hidden_state[0]
