"""Which files hold weights that are not ordinary safetensors (vllm/model_executor/model_loader: `DefaultModelLoader`,
`ShardedStateLoader`). Imports no torch."""

from __future__ import annotations

from pathlib import Path

from stage03_engine.model_path import WeightFormat
from stage03_engine.plugins import wanted

_ROOM = "stage03_engine.core.features.load_formats."
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""Files with these beginnings lie beside weights that were trained by transformers' Trainer."""


class Pickled(WeightFormat):
    """*.bin, or else *.pt: what `torch.save` writes."""

    automatic = True
    tensors = _ROOM + "pt:pickled_tensors"

    def files(self, folder: Path) -> list[Path]:
        """Those of the index if there is one, else all *.bin, else all *.pt."""
        index = folder / "pytorch_model.bin.index.json"
        if index.is_file():
            named: list[Path] = wanted("engine", "weight_index", f"what reads {index.name}")(index)
            return named
        for pattern in ("*.bin", "*.pt"):
            if found := sorted(
                path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith(NO_WEIGHTS)
            ):
                return found
        return []


class ShardedState(WeightFormat):
    """model-rank-N-part-M.safetensors: each worker's slices, cut once and for all."""

    cut_already = True
    tensors = _ROOM + "sharded_state:own_tensors"

    def files(self, folder: Path) -> list[Path]:
        """Those of all workers."""
        return sorted(folder.glob("model-rank-*-part-*.safetensors"))


PT, SHARDED_STATE = Pickled(), ShardedState()
