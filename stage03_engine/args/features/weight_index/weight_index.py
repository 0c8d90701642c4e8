"""A checkpoint in several files, and the index of its tensors (vllm/model_executor/model_loader/weight_utils.py). Reads only the index."""

from __future__ import annotations

import os
from pathlib import Path

from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.hf_config import read_json


def files_of(index: Path) -> list[Path]:
    """The files that an index names. It comes with a model from a stranger: it may name the files of its own folder, and no others.

    Raises ModelNotFoundError if one is missing, ConfigError for an index that cannot be used.
    """
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
