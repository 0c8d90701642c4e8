"""Which files hold a model's weights (vllm/model_executor/model_loader/weight_utils.py). Reads their list, not the weights."""

from __future__ import annotations

import os
from pathlib import Path

from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.hf_config import read_json


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index if there is one, else model.safetensors, else every
    *.safetensors. (Some folders hold the same weights again, in their makers' own format, under another name.)

    Raises ModelNotFoundError if there is none or one is missing, ConfigError for an index that cannot be used.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = _files_of(index)
    else:
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(
            f"no weights in {folder}: it holds no *.safetensors file; --load-format dummy serves it with random weights"
        )
    return files


def _files_of(index: Path) -> list[Path]:
    """An index comes with a model from a stranger: it may name the files of its own folder, and no others."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ConfigError(f"{index}: weight_map must say which file holds which tensor")
    names, folder = sorted({str(shard) for shard in shards.values()}), index.parent
    for name in names:
        if not _is_inside(folder, name):
            raise ConfigError(
                f"{index}: {name[:200]!r} lies outside the model's folder, where all of its weights must be"
            )
    if missing := [name for name in names if not os.path.isfile(folder / name)]:
        raise ModelNotFoundError(f"weights are missing in {folder}: {', '.join(missing)}"[:1000])
    return [folder / name for name in names]


def _is_inside(folder: Path, name: str) -> bool:
    """Does the name lead to a file in the folder, or in the hub cache to one of the model's blobs, also over links?"""
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    try:
        real = Path(os.path.realpath(folder / name))
    except ValueError:  # a NUL byte
        return False
    return any(real.is_relative_to(os.path.realpath(home)) for home in homes)
