"""Tensors whose memory goes and comes again, while they stay the same objects."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def tensors_in(root: Any) -> Iterator[Tensor]:
    """All tensors of a model: its parameters and buffers, and what products of packed weights hold, whichever way they do."""
    left, seen = [root], set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if not each.is_mkldnn and not each.is_meta:  # oneDNN's own memory is out of reach
                yield each
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        elif isinstance(each, partial):
            left += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, MethodType):
            left.append(each.__self__)
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or () if cell.cell_contents is not None]
        elif isinstance(each, nn.Module) or (callable(each) and not isinstance(each, type)):
            left += getattr(each, "__dict__", {}).values()


class Away:
    """The memory of some tensors, given back. On a CPU the pages go to the operating system, and come back as zeros when they are next touched;
    on a GPU torch's allocator gets it, and with `keep` the values wait in the CPU's memory."""

    def __init__(self, tensors: Iterable[Tensor], keep: bool) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._kept: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        self.nbytes = 0
        for storage in storages.values():
            size = storage.nbytes()
            if storage.device.type == "cpu":
                self.nbytes += give_pages_back(storage.data_ptr(), size)
            elif size:
                self._kept.append((storage, size, storage.cpu() if keep else None))
                storage.resize_(0)
                self.nbytes += size
        gc.collect()
        if self._kept:
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Take the memory again. Raises torch.OutOfMemoryError."""
        for storage, size, values in self._kept:
            storage.resize_(size)
            if values is None:
                torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            else:
                storage.copy_(values)
        self._kept = []


def give_pages_back(address: int, size: int) -> int:
    """Return the whole pages in `size` bytes from `address` to the system; the rest of the values are no longer valid either. Returns the bytes.
    Only Linux does so at once: elsewhere nothing is returned."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + size) // page * page
    if end <= first or MADV_DONTNEED is None or not hasattr(mmap, "MAP_POPULATE"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return end - first if madvise(first, end - first, MADV_DONTNEED) == 0 else 0
