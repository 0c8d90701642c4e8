"""Triton's interpreter prepares once what it would prepare for every call, and leaves `triton.language` as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from stage04_kernels.triton_kernels import quick_interpreter

HOLDERS = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _sums(x_ptr, out_ptr, COLUMNS: tl.constexpr):
    """A row's sum and maximum, twice: device functions of this file and of Triton's own library."""
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * COLUMNS + tl.arange(0, COLUMNS))
    tl.store(out_ptr + row, _twice(tl.sum(x) + tl.max(x)))


@triton.jit
def _broken(x_ptr):
    tl.store(x_ptr, tl.arange(0, 3))  # not a power of two


def launch() -> None:
    x = torch.arange(12.0).view(3, 4)
    out = torch.zeros(3)
    _sums[(3,)](x, out, 4)
    assert out.tolist() == (2 * (x.sum(1) + x.amax(1))).tolist()


def language() -> list[dict[str, Any]]:
    """All its names, but one that Python gives a class when somebody looks for it."""
    return [{name: value for name, value in vars(holder).items() if name != "__annotations__"} for holder in HOLDERS]


def test_it_is_at_work() -> None:
    assert isinstance(interpreter._patch_lang, quick_interpreter.Exchange)
    assert interpreter._get_np_dtype is quick_interpreter.np_dtype


def test_after_a_launch_the_language_is_as_it_was() -> None:
    before = language()
    launch()
    assert language() == before
    with pytest.raises(Exception, match="power of 2"):
        _broken[(1,)](torch.zeros(4))
    assert language() == before


def test_the_language_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launch()
    looks: list[object] = []
    monkeypatch.setattr(inspect, "getmembers", lambda *asked: looks.append(asked) or [])
    launch()
    assert not looks


def test_a_launch_that_ends_takes_nothing_from_another_that_runs() -> None:
    exchange, plain = quick_interpreter.Exchange(), tl.arange
    exchange(_sums.fn)
    ours = tl.arange
    exchange(_sums.fn)
    exchange.restore()
    assert tl.arange is ours is not plain
    exchange.restore()
    assert tl.arange is plain


def test_a_device_function_may_be_called_alone() -> None:
    one = tl.tensor(interpreter.TensorHandle(torch.ones(1).numpy(), tl.float32), tl.float32)
    before = language()
    try:
        assert _twice(one).handle.data.tolist() == [2]
    finally:  # Triton leaves it exchanged then
        for holder, names in zip(HOLDERS, before):
            for name in {*vars(holder)} - {*names, "__annotations__"}:
                delattr(holder, name)
            for name, value in names.items():
                if vars(holder)[name] is not value:
                    setattr(holder, name, value)


@pytest.mark.parametrize("kind", [
    *(value for value in vars(tl).values() if isinstance(value, tl.dtype) and value not in (tl.void,)),
], ids=str)  # fmt: skip
def test_each_type_is_kept_as_the_interpreter_keeps_it(kind: Any) -> None:
    def outcome(ask: Callable[[Any], Any], of: Any) -> Any:
        try:
            return ask(of)
        except KeyError:
            return None

    for each in (kind, tl.pointer_type(kind), tl.block_type(kind, [4]), tl.block_type(tl.pointer_type(kind), [4])):
        for _ in range(2):
            assert outcome(quick_interpreter.np_dtype, each) == outcome(quick_interpreter._get_np_dtype, each)
