"""The judge of exercise 17: batches of a few rows with small whole numbers, whose sums are exact in every order; and places that are all taken."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, strategies as st
from judging import Judge
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stage04_kernels.features.lora import NO_PLACE, RowGroups

judge = Judge(17)
NUM_PLACES, RANK = 3, 2
PLACES = st.lists(st.integers(NO_PLACE, NUM_PLACES - 1), max_size=6)


def groups_of(place_of: list[int]) -> list[tuple[int, list[int] | None]]:
    """What is obviously right."""
    used = sorted({place for place in place_of if place != NO_PLACE})
    rows = [(place, [row for row, each in enumerate(place_of) if each == place]) for place in used]
    return [(place, None if len(own) == len(place_of) else own) for place, own in rows]


@judge.settings(100)
@given(place_of=PLACES)
def test_groups(impl: ModuleType, place_of: list[int]) -> None:
    with judge.case(place_of=place_of):
        found: Any = impl.group_rows(np.array(place_of, dtype=np.int64))
        got = [(int(place), None if rows is None else [int(row) for row in rows]) for place, rows in found]
        expected = groups_of(place_of)
        in_groups = {row for _, rows in got for row in rows or []}
        alone = {row for row, place in enumerate(place_of) if place == NO_PLACE}
        alone_in_none = bool(alone) and any(rows is None for _, rows in got)
        judge.holds("nobody", NO_PLACE not in dict(got) and not alone & in_groups and not alone_in_none, expected, got)
        single = len(expected) == 1 and expected[0][1] is None
        judge.equal(
            "everybody" if single and [place for place, _ in got] == [expected[0][0]] else "groups", expected, got
        )


@dataclass(frozen=True)
class Batch:
    """The place of each row, and a seed of small whole numbers."""

    place_of: tuple[int, ...]
    seed: int
    size: int = 3  # of the layer's inputs and outputs

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, x, a, b: new ones each time."""
        generator = torch.Generator().manual_seed(self.seed)

        def some(*sizes: int) -> Tensor:
            return torch.randint(-2, 3, sizes, generator=generator).float()

        rows = len(self.place_of)
        y, x = some(rows, self.size), some(rows, self.size)
        return y, x, some(NUM_PLACES, RANK, self.size).to(dtype), some(NUM_PLACES, self.size, RANK).to(dtype)

    def groups(self) -> RowGroups:
        """As the engine has them."""
        found = RowGroups.of(self.place_of)
        rows = [(place, None if rows is None else torch.tensor(rows)) for place, rows in groups_of([*self.place_of])]
        vars(found)["by_place"] = rows  # already found: it is another function of the exercise that finds them
        return found

    def expected(self) -> Tensor:
        """Row by row."""
        y, x, a, b = self.tensors()
        for row, place in enumerate(self.place_of):
            if place != NO_PLACE:
                y[row] += b[place] @ (a[place] @ x[row])
        return y

    def __repr__(self) -> str:
        y, x, a, b = self.tensors()
        used = sorted({*self.place_of} - {NO_PLACE})
        pairs = ", ".join(f"A{place} {a[place].tolist()} B{place} {b[place].tolist()}" for place in used)
        return f"place_of {[*self.place_of]}, y {y.tolist()}, x {x.tolist()}, {pairs}"


BATCHES = st.builds(
    Batch, st.lists(st.integers(NO_PLACE, NUM_PLACES - 1), min_size=1, max_size=5).map(tuple), st.integers(0, 99)
)


@judge.settings(100)
@given(batch=BATCHES)
def test_sums(impl: ModuleType, batch: Batch) -> None:
    y, x, a, b = batch.tensors()
    before, expected = batch.tensors(), batch.expected()
    with judge.case(batch=batch):
        got = impl.add_low_rank(y, x, a, b, batch.groups())
        judge.holds(
            "in_place", got is y, "the y that was given", "another tensor" if isinstance(got, Tensor) else repr(got)
        )
        for name, now, then in zip("xab", (x, a, b), before[1:], strict=True):
            judge.holds("in_place", torch.equal(now, then), f"{name} as it was", f"{name} {now.tolist()}")
        for row, place in enumerate(batch.place_of):
            if place == NO_PLACE:
                judge.holds("alone", torch.equal(y[row], before[0][row]), f"row {row} as it was", y[row].tolist())
            else:
                close = torch.allclose(y[row], expected[row])
                judge.holds("own", close, f"row {row}: {expected[row].tolist()}", y[row].tolist())


@judge.settings(30)
@given(batch=BATCHES)
def test_formats(impl: ModuleType, batch: Batch) -> None:
    """With the numbers 256 and 1/256 in it bfloat16 cannot hold a sum that float32 can: so it shows in which format it was made."""
    assume({*batch.place_of} - {NO_PLACE})
    y, x, a, b = batch.tensors(torch.bfloat16)
    x = x * 257  # in bfloat16 this is 256
    expected = y.clone()
    for place, rows in batch.groups().by_place:
        own = slice(None) if rows is None else rows
        expected[own] += ((x[own].bfloat16() @ a[place].T) @ b[place].T).float()
    with judge.case(batch=batch, formats="y and x in float32, x 257 times as large; a and b in bfloat16"):
        try:
            got = impl.add_low_rank(y, x, a, b, batch.groups())
        except RuntimeError as error:
            judge.rejects("formats", "a sum", f"RuntimeError: {str(error).splitlines()[0]}", error)
        judge.holds("formats", got.dtype == torch.float32, "y in float32", str(got.dtype))
        judge.holds("formats", torch.allclose(got, expected), expected.tolist(), got.tolist())


def products(impl: ModuleType, batch: Batch) -> tuple[int, int]:
    """(how many products of matrices were made, and of how many multiplications)."""
    counter = FlopCounterMode(display=False)
    made = 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal made
            made += func.overloadpacket.__name__ in PRODUCTS
            return func(*args, **(kwargs or {}))

    with counter, Counting():
        impl.add_low_rank(*batch.tensors(), batch.groups())
    return made, counter.get_total_flops() // 2


PRODUCTS = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "mv",
    "dot",
    "addmv",
    "addr",
    "addbmm",
    "addmm_",
    "addmv_",
    "baddbmm_",
    "addbmm_",
}


@judge.settings(20)
@given(
    place_of=st.lists(st.integers(NO_PLACE, NUM_PLACES - 1), min_size=1, max_size=4),
    many=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_work(impl: ModuleType, place_of: list[int], many: int, seed: int) -> None:
    batch = Batch(tuple(place_of) * many, seed, size=32)
    rows, used = sum(place != NO_PLACE for place in batch.place_of), {*place_of} - {NO_PLACE}
    with judge.case(place_of=[*batch.place_of], sizes=f"a layer of {batch.size} inputs and outputs, rank {RANK}"):
        made, work = products(impl, batch)
        most = rows * RANK * 2 * batch.size
        judge.holds("thin", work <= most, f"at most {most} multiplications", f"{work}")
        judge.holds("grouped", made <= 2 * len(used), f"at most {2 * len(used)} products", f"{made}")


@dataclass(frozen=True)
class Full:
    """A layer's places, and who may not leave."""

    places: tuple[tuple[int, int], ...]  # adapter, place
    num_places: int
    in_batch: frozenset[int]
    pinned: frozenset[int]

    def expected(self) -> tuple[int, int | None]:
        free = [place for place in range(self.num_places) if place not in dict(self.places).values()]
        if free:
            return free[0], None
        may = [adapter for adapter, _ in self.places if adapter not in self.in_batch]
        leaves = next((adapter for adapter in may if adapter not in self.pinned), may[0])
        return dict(self.places)[leaves], leaves

    def __repr__(self) -> str:
        held = f"{dict(self.places)} of {self.num_places}"
        return f"places {held}, in_batch {sorted(self.in_batch)}, pinned {sorted(self.pinned)}"


@st.composite
def fulls(draw: st.DrawFn) -> Full:
    num_places = draw(st.integers(1, 4))
    adapters = draw(st.lists(st.integers(1, 9), unique=True, max_size=num_places))
    where = draw(st.permutations(range(num_places)))[: len(adapters)]
    some = st.frozensets(st.sampled_from(adapters)) if adapters else st.just(frozenset[int]())
    in_batch, pinned = draw(some), draw(some)
    if len(in_batch) == num_places:
        in_batch -= {draw(st.sampled_from(adapters))}
    return Full(tuple(zip(adapters, where, strict=True)), num_places, in_batch, pinned)


@judge.settings(200)
@given(full=fulls())
def test_who_makes_room(impl: ModuleType, full: Full) -> None:
    with judge.case(full=full):
        given_places = dict(full.places)
        place, leaves = impl.place_for(given_places, full.num_places, set(full.in_batch), set(full.pinned))
        expected = full.expected()
        if len(full.places) < full.num_places:
            judge.equal("free", expected, (place, leaves))
        judge.holds("batch", leaves not in full.in_batch, expected, (place, leaves))
        others = [adapter for adapter, _ in full.places if adapter not in full.in_batch | full.pinned]
        judge.holds("pinned", not others or leaves not in full.pinned, expected, (place, leaves))
        judge.equal("oldest", expected, (place, leaves))
