"""The checkpoint's weights for other engines' Pythons, which need numpy for it and no safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, float32, without the `transformer.` before their names. Matrices are [inputs, outputs]."""
    blob = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])

    def read(about: dict[str, list[int]]) -> np.ndarray:
        start, stop = about["data_offsets"]
        return np.frombuffer(blob, np.float32, (stop - start) // 4, 8 + size + start).reshape(about["shape"])

    header.pop("__metadata__", None)
    return {name.removeprefix("transformer."): read(about) for name, about in header.items()}
