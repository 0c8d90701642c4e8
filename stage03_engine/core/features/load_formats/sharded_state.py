"""Weights that are cut already: each worker reads its own files, and nothing else
(vllm/model_executor/model_loader/sharded_state_loader.py).

    python -m stage03_engine.core.features.load_formats.save_sharded_state --model gpt2 -tp 2 --out FOLDER
    python -m stage02_server serve FOLDER --load-format sharded_state -tp 2

The names in the files are the checkpoint's, as a pipeline stage numbers its layers (vLLM's are those of its modules, which fuse matrices).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.parallel_state import ranks
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.errors import ConfigError

PART_BYTES = 5 * 10**9  # of a file, vLLM's max_size
_RANK = re.compile(r"model-rank-(\d{1,6})-part-\d{1,6}\.safetensors")


def save_rank(folder: Path, own: Ranks, slices: Iterable[tuple[str, Tensor]], part_bytes: int = PART_BYTES) -> int:
    """Write one worker's slices, in files of at most `part_bytes` (or one tensor). Returns how many files."""
    part, waiting, num_bytes = 0, dict[str, Tensor](), 0
    for name, tensor in slices:
        if waiting and num_bytes + tensor.nbytes > part_bytes:
            _save(folder, own, part, waiting)
            part, waiting, num_bytes = part + 1, {}, 0
        waiting[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
    _save(folder, own, part, waiting)
    return part + 1


def _save(folder: Path, own: Ranks, part: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / f"model-rank-{own.rank}-part-{part}.safetensors", {"format": "pt"} | _made_for(own))


def _made_for(own: Ranks) -> dict[str, str]:
    return {"rank": str(own.rank), "tensor_parallel_size": str(own.tp_size), "pipeline_parallel_size": str(own.pp_size)}


def own_tensors(config: VllmConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, memory-mapped slice) of this worker. Raises ConfigError for files of another number of workers."""
    folder, own = Path(config.model_config.model_path or ""), ranks()
    files = sorted(
        path
        for path in folder.glob("model-rank-*")
        if (match := _RANK.fullmatch(path.name)) and int(match[1]) == own.rank
    )
    if not files:
        raise ConfigError(f"{folder} has no slices for worker {own.rank} of {own.world_size}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                _check(file, stored.metadata() or {}, _made_for(own))
                for name in stored.keys():  # noqa: SIM118 - not a dict
                    yield name, stored.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read the weights in {file}: {error}") from error


def _check(file: Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ConfigError(f"{file} was made for {key} {found.get(key)}, not {value}")
