"""CUDA graphs without CUDA: the same rules on a CPU, and an error where a GPU would silently compute with stale numbers.

A CUDA graph keeps launches with the addresses that they had. So does this: while a function runs once, each operation of torch's, and each launch of a Triton kernel under its
interpreter, is written down with the memory of its arguments, and a replay does them again on that memory. Python runs only while it is recorded. What it shows: that whatever changes between steps lies at a
fixed address and is copied there, and that no number of the first step has stayed in the graph. What it does not show: speed, and what a GPU's allocator does with memory that is shared.

Like a graph, a recording owns what it allocated and nothing else. Whoever owns the rest must keep it, where it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from stage03_engine.core.features.cuda_graphs.modes import WARM_UPS

Run = Callable[[], Any]
Replay = Callable[[], None]
_ON_THE_HOST = ("tolist", "numpy", "__array__", "cpu")
"""Methods of tensors that wait for the device, and that no dispatch mode sees on a CPU; `item` and the like it does see."""
_FROM_THE_HOST = ("tensor", "as_tensor", "from_numpy", "frombuffer", "asarray")
"""Functions that make a tensor of Python's values: a replay would make it of the same ones again."""
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class GraphError(RuntimeError):
    """A graph cannot hold what the function does, or what it reads is not there any more; the message says what."""


@dataclass
class _Outside:
    """A tensor in memory that the recording did not allocate: it knows the address, and keeps nobody from giving the memory away."""

    storage: StorageWeakRef
    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Outside:
        storage = tensor.untyped_storage()
        place = (tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)
        return cls(StorageWeakRef(storage), storage.data_ptr(), *place)

    def tensor(self) -> Tensor:
        """The tensor as it is now. Raises GraphError if its memory has another owner, or another place."""
        what = f"a tensor {list(self.size)} of {self.dtype}"
        if self.storage.expired():
            raise GraphError(f"the graph reads {what} that nobody keeps any more")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage.data_ptr() != self.address:
            raise GraphError(f"the graph reads {what} that lies somewhere else now")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass
class _Operation:
    """One operation or launch. `note` is what must be the same if Python ran again."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, Any]  # positional, and by name
    results: list[Tensor]  # to be overwritten; empty if the operation writes by itself
    note: tuple[Any, ...]

    def run(self) -> None:
        """Do it again."""
        with torch.inference_mode():
            args, kwargs = tree_map_only(_Outside, _Outside.tensor, self.arguments)
            found = self.call(*args, **kwargs)
            for result, new in zip(self.results, _tensors(found)):
                result.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@dataclass
class _Program:
    """What one graph holds."""

    operations: list[_Operation] = field(default_factory=list)

    def replay(self) -> None:
        """All of it again, in order."""
        for operation in self.operations:
            operation.run()


class _Recorder(TorchDispatchMode):
    """Sees each operation while it is entered, and writes it down between `begin` and `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.program: _Program | None = None
        self._own: dict[int, tuple[int, Any]] = {}  # memory that the graphs allocated: its number, and itself
        self._first = 0  # the number of the first of them in this session
        self._busy = False

    def start(self) -> None:
        """A session begins: memory is counted from here."""
        self._first = len(self._own)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by torch. True: what torch.compile has made runs, and is seen operation by operation, where its backend left any."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, program = kwargs or {}, self.program
        if self._busy:
            return func(*args, **kwargs)
        name = func._schema.name
        if (custom := OPDEFS.get(name)) is not None:  # a function of Python's, whose operations are seen one by one
            with self:
                return custom._init_fn(*args, **kwargs)
        if program is None:
            return func(*args, **kwargs)
        if func._can_decompose():  # so does an operation that torch composes of others
            with self:
                return func.decompose(*args, **kwargs)
        self._refuse(func, name, args)
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        new = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in before]
        if new or func._schema.is_mutable:
            note = self._note(name, (args, kwargs))
            kept = self._kept((args, kwargs))
            for tensor in new:
                storage = tensor.untyped_storage()
                self._own[storage._cdata] = len(self._own), storage
            if name.removeprefix("aten::") not in _UNWRITTEN:
                program.operations.append(_Operation(name, func, kept, _tensors(result) if new else [], note))
        return result

    def launched(self, executor: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A Triton kernel is launched."""
        if self.program is not None and not self._busy:
            name, kept = f"kernel {executor.fn.__name__}", self._kept((args, kwargs))
            note = self._note(name, (executor.grid if isinstance(executor.grid, tuple) else None, args, kwargs))

            def again(*args: Any, **kwargs: Any) -> None:
                call(executor, *args, **kwargs)

            self.program.operations.append(_Operation(name, again, kept, [], note))
        self._busy, was = True, self._busy
        try:
            call(executor, *args, **kwargs)
        finally:
            self._busy = was

    def _refuse(self, func: Any, name: str, args: Any) -> None:
        by_mask = any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in _indices(args)
        )
        if torch.Tag.data_dependent_output in func.tags:
            raise GraphError(f"{name} waits for the device and gives its numbers to Python, which runs only once")
        if by_mask or (
            torch.Tag.dynamic_output_shape in func.tags and name not in ("aten::index", "aten::_unsafe_index")
        ):
            raise GraphError(f"{name} gives a tensor whose size depends on numbers")

    def _kept(self, tree: Any) -> Any:
        """Arguments as the graph keeps them: its own tensors, the addresses of others, Python's values."""
        return tree_map_only(Tensor, lambda each: each if self._number(each) is not None else _Outside.of(each), tree)

    def _number(self, tensor: Tensor) -> int | None:
        found = self._own.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0] - self._first

    def _note(self, name: str, tree: Any) -> tuple[Any, ...]:
        leaves: list[Any] = []
        for leaf in tree_flatten(tree)[0]:
            if isinstance(leaf, Tensor):
                number = self._number(leaf)
                where = ("outside", leaf.data_ptr()) if number is None else ("own", number, leaf.storage_offset())
                leaves.append((*where, tuple(leaf.size()), tuple(leaf.stride()), leaf.dtype))
            else:
                leaves.append(repr(leaf))
        return (name, *leaves)


def _indices(args: Any) -> list[Any]:
    return list(args[1]) if len(args) > 1 and isinstance(args[1], (list, tuple)) else []


@contextmanager
def _seen(recorder: _Recorder) -> Iterator[None]:
    """While this lasts, the recorder sees launches, and what no dispatch mode sees is refused."""

    def refuses(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if recorder.program is not None and not recorder._busy:
                raise GraphError(f"{what}: between host and device, which a graph does not repeat")
            return original(*args, **kwargs)

        return call

    changed: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    try:
        for name in _ON_THE_HOST:
            put(Tensor, name, refuses(f"Tensor.{name}", getattr(Tensor, name)))
        for name in _FROM_THE_HOST:
            put(torch, name, refuses(f"torch.{name}", getattr(torch, name)))
        if (triton := sys.modules.get("triton.runtime.interpreter")) is not None:
            call = triton.GridExecutor.__call__
            put(
                triton.GridExecutor,
                "__call__",
                lambda executor, *args, **kwargs: recorder.launched(executor, call, args, kwargs),
            )
        native: Any = sys.modules.get("stage04_kernels.backends.native.library")
        if native is not None:
            put(native.recording, "to", _refuse_native)
        yield
    finally:
        for owner, name, value in reversed(changed):
            delattr(owner, name) if value is None else setattr(owner, name, value)


def _refuse_native(name: str, letters: str, values: Any) -> None:
    raise GraphError(f"{name} is a function of native.cpp, which these graphs do not see")


class SimulatedGraphs:
    """In the place of `CudaGraphs`."""

    def __init__(self) -> None:
        self._recorder = _Recorder()
        self._programs: list[_Program] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        """Graphs are recorded in here."""
        recorder = self._recorder
        recorder.start()
        self._programs = []
        with _seen(recorder), ExitStack() as self._entered:
            try:
                yield
            finally:
                recorder.program = None

    def warm_up(self, run: Run) -> None:
        """Run it as often as before a real recording."""
        for _ in range(WARM_UPS):
            run()

    def begin(self) -> None:
        """From now on what runs is recorded. What runs before is not watched: torch.compile would compile the watching, too."""
        if not self._programs:
            self._entered.enter_context(self._recorder)
        self._recorder.program = _Program()

    def end(self) -> Replay:
        """The graph of what ran since `begin`."""
        program, self._recorder.program = self._recorder.program, None
        assert program is not None
        self._programs.append(program)
        return program.replay


def operations_of(replay: Replay) -> list[str]:
    """What a graph does, in order."""
    program: _Program = replay.__self__  # type: ignore[attr-defined]
    return [operation.name.removeprefix("aten::") for operation in program.operations]


def check_again(replays: list[Replay], record: Callable[[SimulatedGraphs], Any]) -> None:
    """Record once more, and raise GraphError where Python would now run something else than what the graphs hold: another operation, another
    number of Python's, or a tensor at another address."""
    graphs = SimulatedGraphs()
    record(graphs)
    held: list[Any] = [getattr(replay, "__self__", None) for replay in replays]
    if len(held) != len(graphs._programs):
        raise GraphError(f"Python would now record {len(graphs._programs)} graphs, not {len(held)}")
    for number, (old, new) in enumerate(zip(held, graphs._programs)):
        for was, now in zip(old.operations, new.operations):
            if was.note != now.note:
                at = next((place for place, (a, b) in enumerate(zip(was.note, now.note)) if a != b), 0)
                raise GraphError(
                    f"graph {number}: Python would now run {now.name} with {now.note[at:]}, not {was.name} with {was.note[at:]}"
                )
        if len(old.operations) != len(new.operations):
            raise GraphError(
                f"graph {number}: Python would now run {len(new.operations)} operations, not {len(old.operations)}"
            )
