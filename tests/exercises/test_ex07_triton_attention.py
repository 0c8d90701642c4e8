"""The judge of exercise 7: each small function alone, in a kernel of the judge's or in the reference's; then the whole kernel, watched
at every load and store. All under Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from attention_batch import Batch, batches, check_reads, close, plural, probe_tensors, random_tensors, shown
from hypothesis import example, given, strategies as st
from judging import Judge
from kernel_guard import Report, guard
from torch import Tensor
from triton.runtime.errors import InterpreterError

from stage04_kernels.paged_attention import paged_attention_torch
from stage04_kernels.triton_kernels import paged_attention as kernels
from stage04_kernels.triton_kernels.paged_attention import _scores, _softmax_step, paged_attention_triton
from stage04_kernels.triton_kernels.tiles import AttentionTiles, Tile

judge = Judge(7)
PARTS = list(judge.exercise.parts)
UNSEEN = -torch.inf
NUMBERS = [0.0, 1.0, -2.0, 3.0]


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton wraps what a kernel raises once per function that was called: raise the error itself."""
    try:
        with np.errstate(all="ignore"):  # -inf - -inf is the solution's business
            yield
    except InterpreterError as error:
        inner: BaseException = error
        while isinstance(inner, InterpreterError) and inner.__cause__ is not None:
            inner = inner.__cause__
        raise inner from None


def tiny(rows: int, keys: int, upcast: bool = True) -> AttentionTiles:
    """So many rows in a tile, and keys at a time."""
    return AttentionTiles("tiny", lambda *_: Tile(rows, keys, 4), 1, upcast, 1)


# Each function alone: the two that load are put into the reference's kernel, the two that compute into kernels of the judge's.


def attend(
    impl: ModuleType, names: list[str], batch: Batch, query: Tensor, cache: Tensor, scale: float = 1.0,
    tiles: AttentionTiles | None = None, num_splits: int = 1,
) -> Tensor:  # fmt: skip
    """The result of the real launch with these parts of the solution; no address outside a tensor, and nothing written twice."""
    parts = {name: getattr(impl, name) for name in names}
    with mock.patch.multiple(kernels, **parts), interpreted(), guard() as report:
        result: Tensor = paged_attention_triton(
            query, cache, batch.metadata(), scale, batch.window, num_splits=num_splits, tiles=tiles or tiny(8, 4)
        )
    check_accesses(report)
    return result


def check_accesses(report: Report) -> None:
    for finding in report.findings:
        key = "tiles" if finding.kind == "written twice" else "rows" if finding.argument == "query_ptr" else "bounds"
        judge.rejects(key, "every address in its tensor, and each result written by one program", str(finding))


def check_loader(impl: ModuleType, name: str, batch: Batch) -> None:
    with judge.case(function=f"{name}, in the reference's kernel", batch=batch):
        check_reads(judge, batch, attend(impl, [name], batch, *probe_tensors(batch)))
        got = attend(impl, [name], batch, *random_tensors(batch))
        judge.holds(
            "bounds",
            not got.isnan().any(),
            "no number from a slot that is nobody's",
            "NaN, which stands in these slots",
        )


def small_batches(test: Callable[..., None]) -> Callable[..., None]:
    """These come first: a launch costs much, and what a loader gets wrong shows in one of them, as small as it can be."""
    for batch in (
        Batch(((2, 1), (0, 1)), num_heads=2, padding=1),
        Batch(((0, 1),), num_heads=2, num_kv_heads=2),
        Batch(((0, 3),)),
        Batch(((0, 1),)),
    ):
        test = example(batch=batch)(test)
    return test


@judge.settings(2)
@given(batch=batches(windows=False, most_requests=2))
@small_batches
def test_the_blocks(impl: ModuleType, batch: Batch) -> None:
    check_loader(impl, "_load_blocks", batch)


@judge.settings(2)
@given(batch=batches(windows=False, most_requests=2))
@small_batches
def test_keys_and_values(impl: ModuleType, batch: Batch) -> None:
    check_loader(impl, "_load_keys_and_values", batch)


@triton.jit
def _call_scores(
    out_ptr, query_ptr, key_ptr, first_ptr, last_ptr, start, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    row, key, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, DIM)
    query = tl.load(query_ptr + row[:, None] * DIM + dim[None, :])
    keys = tl.load(key_ptr + key[:, None] * DIM + dim[None, :])
    first, last = tl.load(first_ptr + row), tl.load(last_ptr + row)
    scores = _scores(query, keys, start + key, first, last, scale, HAS_WINDOW)
    tl.store(out_ptr + row[:, None] * KEYS + key[None, :], scores)


@judge.settings(40)
@given(
    seen=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(-1, 6))] * 2),
    start=st.integers(0, 2),
    window=st.booleans(),
)
def test_scores(impl: ModuleType, seen: tuple[tuple[int, int], ...], start: int, window: bool) -> None:
    query, keys = (
        torch.tensor([[1.0, 2.0], [-1.0, 0.5]]),
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]]),
    )
    first, last = (torch.tensor(each, dtype=torch.int32) for each in zip(*seen))
    positions = list(range(start, start + 4))
    scores = torch.full((2, 4), torch.nan)
    with judge.case(function=f"_scores, the keys at positions {positions}, HAS_WINDOW {window}"):
        with mock.patch.object(sys.modules[__name__], "_scores", impl._scores), interpreted():
            _call_scores[(1,)](scores, query, keys, first, last, start, 0.5, ROWS=2, KEYS=4, DIM=2, HAS_WINDOW=window)
        for row, (begin, end) in enumerate(seen):
            visible = [(begin if window else 0) <= position <= end for position in positions]
            dots = (keys @ query[row] * 0.5).tolist()
            expected = [score if sees else UNSEEN for score, sees in zip(dots, visible)]
            with judge.case(row=f"first_seen {begin}, last_seen {end}"):
                check_scores(expected, scores[row].tolist(), window and begin > 0)


def check_scores(expected: list[float], got: list[float], window: bool) -> None:
    hidden = any(mine != UNSEEN for mine, right in zip(got, expected) if right == UNSEEN)
    if hidden and not any(mine == UNSEEN for mine in got):
        judge.rejects("unseen", expected, got)
    right = all(abs(a - b) < 1e-5 or a == b for a, b in zip(expected, got))
    judge.holds("window" if window else "causal", right, f"{expected}", f"{got}")


@triton.jit
def _call_softmax_step(
    scores_ptr, value_ptr, largest_ptr, total_ptr, mixed_ptr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr
):
    row, key, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, DIM)
    at = row[:, None] * DIM + dim[None, :]
    scores = tl.load(scores_ptr + row[:, None] * KEYS + key[None, :])
    value = tl.load(value_ptr + key[:, None] * DIM + dim[None, :])
    largest, total, mixed = tl.load(largest_ptr + row), tl.load(total_ptr + row), tl.load(mixed_ptr + at)
    largest, total, mixed = _softmax_step(scores, value, largest, total, mixed)
    tl.store(largest_ptr + row, largest)
    tl.store(total_ptr + row, total)
    tl.store(mixed_ptr + at, mixed)


def softmax_state(scores: Tensor, value: Tensor) -> dict[str, Tensor]:
    """largest, total and mixed after these keys: scores [rows, keys], value [keys, dim]."""
    largest = scores.amax(dim=1)
    weights = torch.exp2(scores - largest.nan_to_num(neginf=0.0)[:, None])
    return {"largest": largest, "total": weights.sum(dim=1), "mixed": weights @ value}


ROW = st.lists(st.sampled_from([*NUMBERS, UNSEEN, 200.0]), min_size=2, max_size=2)


@judge.settings(40)
@given(before=ROW, now=ROW)
def test_a_step_of_the_softmax(impl: ModuleType, before: list[float], now: list[float]) -> None:
    check_step(impl, before, now)


@judge.settings(20)
@given(scores=ROW, which=st.sampled_from(["before", "now", "both"]))
def test_a_step_in_which_a_row_sees_nothing(impl: ModuleType, scores: list[float], which: str) -> None:
    nothing = [UNSEEN] * 2
    check_step(impl, scores if which == "now" else nothing, scores if which == "before" else nothing)


def check_step(impl: ModuleType, before: list[float], now: list[float]) -> None:
    """A row with these scores before and now. A second row is its mirror image, so that rows which are mixed up show too."""
    first, second = torch.tensor([before, before[::-1]]), torch.tensor([now, now[::-1]])
    value = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [-1.0, 3.0]])
    state = softmax_state(first, value[:2])
    given_state = ", ".join(f"{name} {rounded(tensor[0])}" for name, tensor in state.items())
    expected = softmax_state(torch.cat([first, second], dim=1), value)
    with judge.case(function="_softmax_step, its first row", before=given_state, scores=now, values=value[2:].tolist()):
        with mock.patch.object(sys.modules[__name__], "_softmax_step", impl._softmax_step), interpreted():
            _call_softmax_step[(1,)](second, value[2:].clone(), *state.values(), ROWS=2, KEYS=2, DIM=2)
        nothing = UNSEEN in (max(before), max(now))
        for name, right in expected.items():
            sure = torch.allclose(state[name], right, rtol=1e-5, atol=1e-5)
            judge.holds("blind" if nothing else "softmax", sure, f"{name} {rounded(right[0])}", rounded(state[name][0]))


def rounded(tensor: Tensor) -> str:
    values = tensor.tolist()
    return str([round(each, 4) for each in values] if isinstance(values, list) else round(values, 4))


# The whole kernel


@judge.settings(12)
@given(batch=batches(most_requests=2, largest_group=3), rows=st.sampled_from([8, 4]), keys=st.sampled_from([4, 2]))
def test_who_sees_what(impl: ModuleType, batch: Batch, rows: int, keys: int) -> None:
    with judge.case(batch=batch, tile=f"{rows} rows, {keys} keys at a time"):
        check_reads(judge, batch, attend(impl, PARTS, batch, *probe_tensors(batch), tiles=tiny(rows, keys)))


@judge.settings(4)
@given(new=st.integers(1, 2))
def test_the_query_is_a_part_of_a_wider_tensor(impl: ModuleType, new: int) -> None:
    check_wide(impl, Batch(((0, new),)), rows=8, splits=1)


@judge.settings(12)
@given(batch=batches(most_requests=2, largest_group=3), rows=st.sampled_from([8, 4]), splits=st.sampled_from([1, 2]))
def test_the_numbers(impl: ModuleType, batch: Batch, rows: int, splits: int) -> None:
    check_wide(impl, batch, rows, splits)


def check_wide(impl: ModuleType, batch: Batch, rows: int, splits: int) -> None:
    """Random numbers. The query is a part of a wider tensor, as a model's query is a part of the product that gives keys and values too."""
    query, cache = random_tensors(batch)
    wide = torch.full((batch.num_tokens, 2 * batch.num_heads, query.shape[2]), torch.nan)
    wide[:, : batch.num_heads] = query
    where = f"random; {batch.num_heads} of {wide.shape[1]} heads of a tensor are the query, the others NaN"
    tile = f"{rows} rows, 4 keys at a time, {splits} {plural(splits, 'split')}"
    with judge.case(batch=batch, tile=tile, numbers=where):
        expected = paged_attention_torch(query, cache, batch.metadata(), 0.5, batch.window)
        got = attend(impl, PARTS, batch, wide[:, : batch.num_heads], cache, 0.5, tiny(rows, 4), splits)
        judge.holds("rows", not got.isnan().any(), shown(expected), shown(got))
        check_numbers(expected, got, splits > 1)


def check_numbers(expected: Tensor, got: Tensor, split: bool) -> None:
    right = close(got.float(), expected.float(), got.dtype)
    judge.holds("tiles" if split else "reference", right, shown(expected), shown(got))


@judge.settings(6)
@given(batch=batches(most_requests=2), upcast=st.booleans())
def test_another_number_format(impl: ModuleType, batch: Batch, upcast: bool) -> None:
    dtype = torch.bfloat16 if upcast else torch.float16  # the interpreter multiplies float16 rightly, bfloat16 not
    query, cache = random_tensors(batch, dtype=dtype)
    with judge.case(batch=batch, numbers=f"random, {dtype}", UPCAST=upcast):
        expected = paged_attention_torch(query, cache, batch.metadata(), 0.5, batch.window)
        got = attend(impl, PARTS, batch, query, cache, 0.5, tiny(8, 4, upcast))
        check_numbers(expected, got, split=False)
