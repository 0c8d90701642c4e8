"""Do again what a function did, without the Python between its calls (the idea of CUDA graphs, for a CPU).

A decode step of GPT-2 is 85 calls of native.cpp, and a few operations of torch's before them. Each call from Python takes some ten
microseconds, to check tensors and to make one for the result, and only one core works meanwhile. A recording keeps the arguments of the
calls, and the tensors that they point to; a replay hands the whole list to native.cpp at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stage04_kernels.backends.native.library import load_library, recording

Run = Callable[[], Tensor]
Call = tuple[str, str, tuple[Any, ...]]
"""Name, letters of the arguments, arguments (library.py)."""
_NEW_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class NotRecordableError(RuntimeError):
    """The function does something that a replay would not repeat; the message says what."""


class _Slot(ctypes.Union):
    _fields_ = (("whole", ctypes.c_int64), ("real", ctypes.c_float), ("pointer", ctypes.c_void_p))


class _Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("slots", ctypes.POINTER(_Slot)))


_FIELD = {"p": "pointer", "i": "whole", "l": "whole", "f": "real"}


def record(run: Run) -> Run:
    """Call `run`, and return a function that does what it would do, on the same memory, and returns the same tensor.

    `run` may read tensors that are changed between replays, but not look into them: its Python code runs only once, and what native.cpp
    would compute is not computed here. Raises NotRecordableError.
    """
    recorder = _Recorder()
    recording.to = recorder.called
    try:
        with recorder:
            output = run()
    finally:
        recording.to = None
    steps, kept = recorder.finished(), recorder.kept

    def replay() -> Tensor:
        for step in steps:
            step()
        return output

    replay.kept = kept  # type: ignore[attr-defined]  # the memory that the calls point to
    return replay


def _picks_by_mask(args: Any) -> bool:
    """Is a tensor indexed by a mask? How many numbers that picks is known only when it runs, so a replay cannot have room for them."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def _is_view_of(result: Any, base: Any) -> bool:
    """Does every tensor of `result` lie in the memory of the tensor `base`?"""
    parts = result if isinstance(result, (list, tuple)) else [result]
    return all(part.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() for part in parts)


class _Recorder(TorchDispatchMode):
    """Sees each operation of torch's, by being a dispatch mode, and each call of native.cpp, by `called`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self._steps: list[Callable[[], Any]] = []
        self._calls: list[Call] = []  # since the last operation of torch's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch. If True, as it is otherwise, the first operation that is seen imports all of torch._dynamo to tell it not to
        compile `__torch_dispatch__`: that takes longer than importing torch, and nothing is compiled here."""
        return False

    def called(self, name: str, letters: str, values: tuple[Any, ...]) -> None:
        """A function of native.cpp is called. Only a replay runs it: nobody looks at a recording's numbers."""
        if not hasattr(load_library(), f"recorded_{name}"):
            raise NotRecordableError(f"{name} cannot be recorded")
        self._calls.append((name, letters, values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation of torch's runs. One that only makes a view or takes memory need not run again. Whether `to` or `reshape` made
        a view or a copy is seen from the memory of the result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        name, changes = func._schema.name, func._schema.is_mutable
        if (func.is_view and _is_view_of(result, args[0])) or name.removeprefix("aten::") in _NEW_MEMORY:
            return result
        if not name.startswith(("aten::", "mkldnn::")) or not isinstance(result, Tensor) or _picks_by_mask(args):
            raise NotRecordableError(f"{name} cannot be recorded")
        if result.numel():
            self._end_of_calls()
            self._steps.append(
                (lambda: func(*args, **kwargs)) if changes else lambda: result.copy_(func(*args, **kwargs))
            )
        return result

    def finished(self) -> list[Callable[[], Any]]:
        """What a replay does, in order."""
        self._end_of_calls()
        return self._steps

    def _end_of_calls(self) -> None:
        """The calls so far become one step."""
        if not self._calls:
            return
        library, program = load_library(), (_Call * len(self._calls))()
        for at, (name, letters, values) in enumerate(self._calls):
            slots = (_Slot * len(values))()
            for slot, letter, value in zip(slots, letters, values, strict=True):
                setattr(slot, _FIELD[letter], value)
            program[at].function = ctypes.cast(getattr(library, f"recorded_{name}"), ctypes.c_void_p)
            program[at].slots = slots
        self.kept.append(program)
        replay, count = library.replay, len(program)
        replay.argtypes, replay.restype = [ctypes.POINTER(_Call), ctypes.c_long], None
        self._steps.append(lambda: replay(program, count))
        self._calls = []
