"""The judge of exercise 8: small scores and values, cut into parts, merged, and held against the softmax over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from hypothesis import given, strategies as st
from judging import Judge
from torch import Tensor

from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part
from stage04_kernels.lab.tolerances import TOLERANCES

judge = Judge(8)
UNSEEN = -torch.inf
SEEN = [0.0, 1.0, -2.0, 3.0]


@dataclass(frozen=True)
class Keys:
    """Scores [rows][keys] and values [keys][head_dim] of some keys, in plain numbers."""

    scores: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]

    def __repr__(self) -> str:
        if not self.values:
            return f"no keys; {len(self.scores)} row{'s' * (len(self.scores) > 1)}"
        return f"scores {[list(row) for row in self.scores]}, values {[list(value) for value in self.values]}"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Scores [rows, keys] and values [keys, 2], new ones each time."""
        scores = torch.tensor(self.scores).reshape(len(self.scores), len(self.values))
        return scores, torch.tensor(self.values).reshape(len(self.values), 2)

    def cut(self, ends: list[int]) -> list[Keys]:
        """These keys in splits that end before the given keys; some splits may be empty."""
        bounds = [0, *sorted(ends), len(self.values)]
        return [Keys(tuple(row[a:b] for row in self.scores), self.values[a:b]) for a, b in pairwise(bounds)]


@st.composite
def keys(draw: st.DrawFn, scores_from: list[float], least: int = 0, most: int = 5, rows: int = 2) -> Keys:
    score = st.sampled_from(scores_from)
    num_rows, num_keys = draw(st.integers(1, rows)), draw(st.integers(least, most))
    sees = st.sampled_from([True, True, False]) if UNSEEN in scores_from else st.just(True)  # may the row see any key?
    scores = [
        tuple(draw(score) if seen else UNSEEN for _ in range(num_keys)) for seen in draw(st.tuples(*[sees] * num_rows))
    ]
    first = st.sampled_from([0.0, 1.0, -1.0, 3.0, 0.1, -0.7, 2.3])
    values = [(draw(first), float(key + 1)) for key in range(num_keys)]
    return Keys(tuple(scores), tuple(values))


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal within the table's tolerance for float32; where NaN or infinity came it must have been expected."""
    tolerance = TOLERANCES[torch.float32]
    return torch.allclose(got, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def numbers(tensor: Tensor) -> str:
    """A tensor as a reader writes it down."""
    return str(_rounded(tensor.tolist()))


def _rounded(number: Any) -> Any:
    return [_rounded(each) for each in number] if isinstance(number, list) else round(number, 5)


def same(key: str, name: str, expected: Tensor, got: Any) -> None:
    """One field has the right shape, kind and numbers."""
    judge.holds(key, isinstance(got, Tensor), f"{name}, a tensor", f"{type(got).__name__}")
    judge.holds(key, got.shape == expected.shape, f"{name} of shape {list(expected.shape)}", f"{list(got.shape)}")
    judge.holds(key, got.dtype == torch.float32, f"{name} in float32", str(got.dtype))
    judge.holds(key, close(got, expected), f"{name} {numbers(expected)}", numbers(got))


def same_part(expected: SoftmaxPart, got: SoftmaxPart, key: str = "") -> None:
    """All three fields, each with the sentence that is named like it unless `key` names one for all."""
    complete = all(hasattr(got, name) for name in SoftmaxPart._fields)
    judge.holds(key or "largest", complete, "a SoftmaxPart", type(got).__name__)
    for name in SoftmaxPart._fields:
        same(key or name, name, getattr(expected, name), getattr(got, name))


def check_part(impl: ModuleType, some: Keys, key: str = "") -> SoftmaxPart:
    """The part that the solution makes of these keys, compared with the reference's."""
    scores, values = some.tensors()
    part: SoftmaxPart = impl.attend_part(scores, values)
    untouched = all(torch.equal(*pair) for pair in zip((scores, values), some.tensors()))
    judge.holds(
        "unchanged", untouched, "scores and values as they were", f"scores {numbers(scores)}, values {numbers(values)}"
    )
    same_part(attend_part(*some.tensors()), part, key)
    return part


@judge.settings(40)
@given(some=keys(SEEN, least=1))
def test_a_part_of_keys_that_are_all_seen(impl: ModuleType, some: Keys) -> None:
    with judge.case(keys=some):
        check_part(impl, some)
    scores, values = (torch.stack([each, each + 1]) for each in some.tensors())
    with judge.case(heads=f"2, in front of the rows; the second's scores and values are larger by 1; {some}"):
        same_part(attend_part(scores, values), impl.attend_part(scores, values))


@judge.settings(40)
@given(some=keys([*SEEN, UNSEEN], least=1))
def test_what_a_row_does_not_see(impl: ModuleType, some: Keys) -> None:
    blind = any(max(row) == UNSEEN for row in some.scores)
    with judge.case(keys=some):
        check_part(impl, some, "nothing" if blind else "unseen")


@judge.settings(5)
@given(rows=st.integers(1, 3))
def test_a_split_without_keys(impl: ModuleType, rows: int) -> None:
    some = Keys(((),) * rows, ())
    with judge.case(keys=some):
        try:
            part = impl.attend_part(*some.tensors())
        except (RuntimeError, IndexError) as error:
            judge.rejects("nothing", "a part", f"{type(error).__name__}: {str(error).splitlines()[0]}", error)
        same_part(attend_part(*some.tensors()), part, "nothing")


@judge.settings(40)
@given(some=keys([0.0, 100.0, -100.0, 3e4, -3e4], least=1, most=3))
def test_large_scores(impl: ModuleType, some: Keys) -> None:
    with judge.case(keys=some):
        check_part(impl, some, "large")


SOME = keys([*SEEN, UNSEEN, 100.0], most=3, rows=1)


@judge.settings(100)
@given(first=SOME, second=SOME)
def test_two_parts_merge_into_one(impl: ModuleType, first: Keys, second: Keys) -> None:
    with judge.case(first=first, second=second):
        parts = [attend_part(*each.tensors()) for each in (first, second)]
        before = [SoftmaxPart(*(field.clone() for field in part)) for part in parts]
        merged = impl.merge_parts(*parts)
        for name, part, kept in zip(("first", "second"), parts, before):
            untouched = all(torch.equal(*pair) for pair in zip(part, kept))
            judge.holds("unchanged", untouched, f"the {name} part as it was: {shown(kept)}", shown(part))
        whole = attend_part(*Keys((first.scores[0] + second.scores[0],), first.values + second.values).tensors())
        check_emptiness(before, merged)
        same_part(whole, merged, "large" if not torch.isfinite(merged.mixed).all() else "merged")


def check_emptiness(parts: list[SoftmaxPart], merged: SoftmaxPart) -> None:
    """Parts of one row, of which some have seen nothing: the other must come out as it went in."""
    seen = [part for part in parts if part.total.item() > 0]
    if not seen:
        same_part(parts[0], merged, "nothing")
    elif len(seen) < len(parts):
        exact = all(torch.equal(*pair) for pair in zip(seen[0], merged))
        judge.holds("neutral", exact, f"the part that saw something, as it was: {shown(seen[0])}", shown(merged))


def shown(part: SoftmaxPart) -> str:
    return ", ".join(f"{name} {getattr(part, name).tolist()}" for name in SoftmaxPart._fields)


@judge.settings(40)
@given(some=keys([*SEEN, UNSEEN], least=1))
def test_the_result(impl: ModuleType, some: Keys) -> None:
    scores, values = some.tensors()
    expected = torch.nan_to_num(torch.softmax(scores, dim=-1)) @ values
    part = attend_part(*some.tensors())
    before = SoftmaxPart(*(field.clone() for field in part))
    with judge.case(part=shown(part)):
        same("finished", "the result", expected, impl.finish(part))
        judge.holds("unchanged", all(torch.equal(*pair) for pair in zip(part, before)), shown(before), shown(part))


@judge.settings(60)
@given(some=keys([*SEEN, UNSEEN, 3e4], least=2), data=st.data())
def test_any_splits_in_any_order(impl: ModuleType, some: Keys, data: st.DataObject) -> None:
    splits = some.cut(data.draw(st.lists(st.integers(0, len(some.values)), min_size=1, max_size=3)))
    order = data.draw(st.permutations(range(len(splits))))
    expected = torch.nan_to_num(torch.softmax(some.tensors()[0].double(), dim=-1)).float() @ some.tensors()[1]
    with judge.case(splits=splits, order=f"merged as {order}"):
        parts = [impl.attend_part(*split.tensors()) for split in splits]
        in_order = impl.finish(reduce(impl.merge_parts, parts))
        same("reference", "the result", expected, in_order)
        shuffled = impl.finish(reduce(impl.merge_parts, [parts[i] for i in order]))
        same("order", "the same result", expected, shuffled)
        same("order", "the same result, merged from the back", expected, impl.finish(from_the_back(impl, parts)))


def from_the_back(impl: ModuleType, parts: list[SoftmaxPart]) -> SoftmaxPart:
    """a + (b + (c + d)), instead of ((a + b) + c) + d."""
    return reduce(lambda right, left: impl.merge_parts(left, right), reversed(parts))
