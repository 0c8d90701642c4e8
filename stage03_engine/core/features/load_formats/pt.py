"""Pickled tensors (vllm/model_executor/model_loader/weight_utils.py, `pt_weights_iterator`).

A pickle can run any code. `weights_only` reads tensors and plain containers, and refuses the rest.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.model_path import weight_files


def pickled_tensors(config: VllmConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, memory-mapped tensor) of every tensor. Raises ConfigError for a file that cannot be read, or holds anything else."""
    for file in weight_files(Path(config.model_config.model_path or ""), config.model_config.load_format):
        state = _read(file)
        if not isinstance(state, dict):
            raise ConfigError(f"{file} holds a {type(state).__name__}, and must hold a dictionary of tensors")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                raise ConfigError(f"{file}: {str(name)[:200]!r} is no dense tensor, as weights must be")
            yield name, tensor.detach()


def _read(file: Path) -> Any:
    try:
        # before version 1.6, torch.save wrote no zip file, which alone can be mapped into memory
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{file} holds more than tensors, or none: reading it might run code, so it is not read"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"cannot read the weights in {file}: {reason[:200]}") from None
