"""Guard mode: run Triton kernels under the interpreter and report what no GPU would tell (compute-sanitizer is the like for compiled
kernels; vLLM has no counterpart).

    with guard() as report:
        paged_attention_triton(...)
    print(report)

Every pointer argument is moved to memory of its own, between red zones, for the length of the launch. So each address that a kernel
loads or stores is known to belong to one element of one argument, or to none. Reported are

    out of bounds     an address outside the argument, or in a gap that its strides leave
    uninitialised     a load of memory from `torch.empty` that nobody has written
    written twice     a store to an element that another program of the same launch has stored to
    foreign block     a load of a KV-cache block that the program's request does not own (see `BlockOwners`)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

RED_ZONE = 1 << 16  # bytes before and behind each argument
MAX_FINDINGS = 100
_POISON = {1: 0xA5, 2: 0x7FDE, 4: 0x7FDEADDE, 8: 0x7FDEADDE7FDEADDE}
"""What fresh memory holds, by element size: for the larger floats a NaN that no arithmetic produces."""


@dataclass(frozen=True)
class Finding:
    """One violation: `index` is the element's, for an argument of that shape; out of bounds it is the flat offset from the
    argument's first element."""

    kind: str
    kernel: str
    argument: str
    index: tuple[int, ...]
    program: tuple[int, int, int]
    detail: str = ""

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return f"{self.kind}: {self.kernel}, argument {self.argument}[{at}], program {self.program}{self.detail}"


@dataclass
class Report:
    """What a guarded stretch of code did wrong; the first MAX_FINDINGS of it."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Note one."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "nothing found"


@dataclass(frozen=True)
class BlockOwners:
    """Who may read which block of the KV cache in a step: the paged-KV sanitizer.

    `owned[r]` are the blocks of request r, from whoever keeps the books (not from the block table that the kernel is given: that is
    what may be wrong). `names[r]` and `step` are for the report. `starts`: where each request's query rows begin, for a kernel that reads for
    several requests at once: each must own the block.
    """

    owned: list[set[int]]
    names: list[str]
    step: int
    starts: list[int] = field(default_factory=list)

    def problem(self, request: int, block: int) -> str:
        """Text for the report; empty when the request owns the block."""
        if block in self.owned[request]:
            return ""
        return f"; step {self.step}: request {self.names[request]} does not own block {block}"


class _Argument:
    """One pointer argument during a launch: a copy in memory of its own."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor, self.itemsize = name, tensor, tensor.element_size()
        self.span = (
            1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
        )
        poison = np.full(max(self.span, 1), _POISON[self.itemsize], dtype=f"u{self.itemsize}").tobytes()
        self.memory = np.frombuffer(bytearray(RED_ZONE) + bytearray(poison) + bytearray(RED_ZONE), dtype=np.uint8)
        self.flat = torch.from_numpy(self.memory)[RED_ZONE : RED_ZONE + self.span * self.itemsize].view(tensor.dtype)
        self.moved = self.flat.as_strided(tensor.shape, tensor.stride()) if self.span else tensor
        self.base = self.flat.data_ptr()
        self.element = np.full(self.span, -1, dtype=np.int64)  # offset -> number of the element, -1 in a gap
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        torch.from_numpy(self.element).as_strided(tensor.shape, tensor.stride()).copy_(numbers)
        self.writer = np.full(self.span, -1, dtype=np.int64)  # offset -> number of the program that stored last
        if self.span:
            self.moved.copy_(tensor)

    def copy_back(self) -> None:
        """What the kernel stored, into the caller's tensor."""
        if self.span and (self.writer >= 0).any():
            self.tensor.copy_(self.moved)

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        """Which of these addresses were meant for this argument: in it, or in its red zones."""
        size = self.span * self.itemsize
        return (addresses >= self.base - RED_ZONE) & (addresses < self.base + size + RED_ZONE)

    def index(self, offset: int) -> tuple[int, ...]:
        """The element at an offset, as an index into the argument's shape."""
        return tuple(int(i) for i in np.unravel_index(self.element[offset], self.tensor.shape))


class _Launch:
    """Watches one launch of one kernel."""

    def __init__(self, kernel: str, arguments: list[_Argument], report: Report, owners: BlockOwners | None) -> None:
        self.kernel, self.arguments, self.report, self.owners = kernel, arguments, report, owners
        self.by_name = {argument.name: argument for argument in arguments}
        self.program = (0, 0, 0)
        self.number = 0

    def begin(self, program: tuple[int, int, int]) -> None:
        """The next program runs."""
        self.program, self.number = program, self.number + 1

    def _split(self, addresses: np.ndarray) -> Iterator[tuple[_Argument, np.ndarray]]:
        """Group addresses by the argument that they were meant for: (argument, offsets in elements)."""
        left = np.ones(addresses.shape, dtype=bool)
        for argument in self.arguments:
            mine = left & argument.holds(addresses)
            if mine.any():
                left &= ~mine
                yield argument, (addresses[mine].astype(np.int64) - argument.base) // argument.itemsize
        for address in addresses[left][:1].astype(np.int64):  # far away: the nearest argument is a guess
            near = min(self.arguments, key=lambda argument: abs(int(address) - argument.base))
            offset = (int(address) - near.base) // near.itemsize
            self.report.add(Finding("out of bounds", self.kernel, f"{near.name}?", (offset,), self.program))

    def _inside(self, argument: _Argument, offsets: np.ndarray) -> np.ndarray:
        """Report what is out of bounds; returns the offsets that are not."""
        within = (offsets >= 0) & (offsets < argument.span)
        real = within.copy()
        real[within] = argument.element[offsets[within]] >= 0
        for offset in offsets[~real][:1]:
            self.report.add(Finding("out of bounds", self.kernel, argument.name, (int(offset),), self.program))
        return offsets[real]

    def loaded(self, addresses: np.ndarray) -> None:
        """Check a load."""
        for argument, offsets in self._split(addresses):
            offsets = self._inside(argument, offsets)
            raw = argument.flat.view(torch.uint8).numpy().view(f"u{argument.itemsize}")
            if argument.itemsize > 1:  # one byte has no pattern to spare
                for offset in offsets[raw[offsets] == _POISON[argument.itemsize]][:1]:
                    index = argument.index(int(offset))
                    self.report.add(Finding("uninitialised", self.kernel, argument.name, index, self.program))
            if (
                self.owners is not None
                and argument.name in ("key_ptr", "value_ptr")
                and ("tile_request_ptr" in self.by_name or (self.owners.starts and "tile_end_ptr" in self.by_name))
            ):
                self._check_owner(argument, offsets)

    def _check_owner(self, argument: _Argument, offsets: np.ndarray) -> None:
        assert self.owners is not None
        per_block = argument.tensor.stride(0)
        for block in np.unique(offsets // per_block):
            problems = (self.owners.problem(request, int(block)) for request in self._requests(self.owners.starts))
            if problem := next(filter(None, problems), ""):
                at = argument.index(int(offsets[offsets // per_block == block][0]))
                self.report.add(Finding("foreign block", self.kernel, argument.name, at, self.program, problem))

    def _requests(self, starts: list[int]) -> list[int]:
        """For whom this program reads."""
        tile, of = self.program[0], {name: argument.moved for name, argument in self.by_name.items()}
        if "tile_request_ptr" in of:
            return [int(of["tile_request_ptr"][tile])]
        rows = of["rows_ptr"][int(of["tile_first_ptr"][tile]) : int(of["tile_end_ptr"][tile])]
        return sorted({bisect_right(starts, int(row)) - 1 for row in rows})

    def stored(self, addresses: np.ndarray, atomic: bool = False) -> None:
        """Check a store."""
        for argument, offsets in self._split(addresses):
            offsets = self._inside(argument, offsets)
            before = argument.writer[offsets]
            for offset in offsets[(before >= 0) & (before != self.number) & (not atomic)][:1]:
                index = argument.index(int(offset))
                self.report.add(Finding("written twice", self.kernel, argument.name, index, self.program))
            argument.writer[offsets] = self.number


def _poisoned(make: Any) -> Any:
    """`torch.empty` and its like, with memory that shows when nobody has written it."""

    def fresh(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = make(*args, **kwargs)
        size = tensor.element_size()
        if tensor.numel() and tensor.is_contiguous():
            torch_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
            tensor.view(torch_int).fill_(_POISON[size])
        return tensor

    return fresh


def _move(named: dict[str, Any]) -> dict[str, _Argument]:
    """Every tensor among the arguments, in memory of its own; one that is passed twice stays one."""
    moved: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Argument] = {}
    of: dict[str, _Argument] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            place = (value.data_ptr(), tuple(value.shape), value.stride())
            if place not in moved:
                moved[place] = _Argument(name, value)
            of[name] = moved[place]
    return of


def _run_launch(executor: Any, call: Any, report: Report, owners: BlockOwners | None, args: Any, kwargs: Any) -> None:
    """One launch, with its arguments moved and its loads and stores watched."""
    builder = interpreter.interpreter_builder
    of = _move(dict(zip(executor.arg_names, args)) | kwargs)
    launch = _Launch(executor.fn.__name__, list({id(each): each for each in of.values()}.values()), report, owners)

    def watched(ptrs: Any, mask: Any, check: Any, **how: Any) -> Any:
        """Check an access; returns the mask without what is out of bounds, which would end the process."""
        addresses, wanted = np.broadcast_arrays(ptrs.data, mask.data.astype(bool))
        check(addresses[wanted], **how)
        known = np.zeros(addresses.shape, dtype=bool)
        for argument in launch.arguments:
            known |= argument.holds(addresses)
        return interpreter.TensorHandle(wanted & known, mask.dtype)

    load, store, rmw, begin = (
        getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "set_grid_idx")
    )

    def watched_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(ptrs, watched(ptrs, mask, launch.loaded), *rest)

    def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(ptrs, value, watched(ptrs, mask, launch.stored), *rest)

    def watched_rmw(op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        return rmw(op, ptr, val, watched(ptr, mask, launch.stored, atomic=True), *rest)

    def watched_begin(x: int, y: int, z: int) -> None:
        launch.begin((x, y, z))
        begin(x, y, z)

    with mock.patch.multiple(
        builder, create_masked_load=watched_load, create_masked_store=watched_store, create_atomic_rmw=watched_rmw,
        set_grid_idx=watched_begin,
    ):  # fmt: skip
        arguments = [
            of[name].moved if isinstance(value, Tensor) else value for name, value in zip(executor.arg_names, args)
        ]
        keywords = {name: of[name].moved if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        call(executor, *arguments, **keywords)
    for argument in launch.arguments:
        argument.copy_back()


@contextmanager
def guard(owners: BlockOwners | None = None) -> Iterator[Report]:
    """Watch every kernel that is launched inside. The kernels run under the interpreter (TRITON_INTERPRET=1), as always then."""
    report, call = Report(), interpreter.GridExecutor.__call__

    def guarded(executor: Any, *args: Any, **kwargs: Any) -> None:
        _run_launch(executor, call, report, owners, args, kwargs)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", guarded),
        mock.patch.object(torch, "empty", _poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", _poisoned(torch.empty_like)),
    ):
        yield report
