"""Pickled tensors (vllm/model_executor/model_loader/weight_utils.py, `pt_weights_iterator`).

A pickle can run any code. `weights_only` reads tensors and plain containers, and refuses the rest. It does so in Python, some microseconds for each byte, so a
pickle that is longer than the names and sizes of a model's tensors can be is not begun.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.model_path import weight_files

TENSOR_BYTES = 512
"""Of a pickle, for each tensor that the model may have: its name and sizes take 90 to 200."""
TENSORS, LAYER_TENSORS = 64, 48
"""More than models have outside their layers, and in each, with the masks and tables that old checkpoints hold too."""
OLD_PICKLES = 5  # before 1.6: a magic number, the version, the machine, the tensors, the names of their memory


def pickled_tensors(config: VllmConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, memory-mapped tensor) of every tensor. Raises ConfigError for a file that cannot be read, or holds anything else."""
    most = left = TENSOR_BYTES * (TENSORS + LAYER_TENSORS * config.shape.whole.num_layers)
    for file in weight_files(Path(config.model_config.model_path or ""), config.model_config.load_format):
        left -= pickled_bytes(file, left)
        if left < 0:
            raise ConfigError(
                f"{file} pickles more than names and sizes of a model's tensors: {most} bytes of them are read"
            )
        state = _read(file)
        if not isinstance(state, dict):
            raise ConfigError(f"{file} holds a {type(state).__name__}, and must hold a dictionary of tensors")
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                raise ConfigError(f"{file}: {str(name)[:200]!r} is no dense tensor, as weights must be")
            yield name, tensor.detach()


# Invariant: takes time in proportion to `most`, or to the list of what is in a zip file, whatever the pickles say.
def pickled_bytes(file: Path, most: int) -> int:
    """How many bytes `torch.load` would unpickle, or some number above `most`. Raises ConfigError for a zip file that cannot be read."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as stored:  # torch finds data.pkl in capitals too
                return sum(each.file_size for each in stored.infolist() if each.filename.lower().endswith(".pkl"))
        with file.open("rb") as stored_before:
            head = stored_before.read(most + 1)
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise _unreadable(file, error) from None
    if head.startswith(b"PK"):
        raise _unreadable(file, "the end of a zip file is missing")
    stream = io.BytesIO(head)
    with suppress(
        ValueError
    ):  # it ends before its pickles do, or they are none, which torch will find at the same place
        for _ in range(OLD_PICKLES):
            deque(pickletools.genops(stream), maxlen=0)
    return stream.tell()


def _read(file: Path) -> Any:
    try:
        # before version 1.6, torch.save wrote no zip file, which alone can be mapped into memory
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{file} holds more than tensors, or none: reading it might run code, so it is not read"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, reason: object) -> ConfigError:
    return ConfigError(f"cannot read the weights in {file}: {str(reason).strip().partition(chr(10))[0][:200]}")
