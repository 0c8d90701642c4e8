"""The same random weights quantized, as a folder for vLLM: `python -m race.quantized FOLDER PRECISION TARGET`, in our Python."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

BITS = {"int8": 8, "int4": 4}
GROUP = 32  # inputs that share a scale in int4, as in q4_0


def write(folder: Path, precision: str, target: Path) -> None:
    """Write `target` in the format of compressed-tensors, config.json last. Matrices are quantized, to the nearest value;
    the output matrix is not, as it is the table of embeddings, which vLLM reads unquantized."""
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_matrix = tensor.ndim == 2 and ".h." in name
        tensors |= (_int8 if precision == "int8" else _int4)(name, tensor) if is_matrix else {name: tensor}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / each, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _format(precision)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _format(precision: str) -> dict[str, Any]:
    """Rows of activations are quantized to int8 beside int8 weights as they come, and stay as they are beside int4."""
    kind = {"num_bits": BITS[precision], "type": "int", "symmetric": True}
    by_row = {**kind, "strategy": "token", "dynamic": True}
    by = {"strategy": "channel"} if precision == "int8" else {"strategy": "group", "group_size": GROUP}
    group = {
        "targets": ["Linear"], "weights": {**kind, **by, "dynamic": False},
        "input_activations": by_row if precision == "int8" else None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized" if precision == "int8" else "pack-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _int8(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """[inputs, outputs], which vLLM turns for GPT-2, and a scale per output."""
    scale = np.abs(tensor).max(0) / 127
    return {name: np.rint(tensor / scale).astype(np.int8), f"{name}_scale": scale[:, None].astype(np.float32)}


def _int4(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """[outputs, inputs / 8]: eight values in a word, the first one lowest, each with 8 added; a scale per group of inputs."""
    rows = np.ascontiguousarray(tensor.T)
    groups = rows.reshape(len(rows), -1, GROUP)
    scale = np.abs(groups).max(2, keepdims=True) / 7
    whole = (np.rint(groups / scale).astype(np.int64) + 8).reshape(len(rows), -1, 8)
    words = (whole << (4 * np.arange(8))).sum(2).astype(np.uint32).view(np.int32)
    return {
        f"{name}_packed": words, f"{name}_scale": scale[:, :, 0].astype(np.float32),
        f"{name}_shape": np.array(rows.shape, np.int64),
    }  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
