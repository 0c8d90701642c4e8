"""Small batches for the judges of paged attention, and a probe that tells which positions each query token has read.

The probe: queries and keys are zeros, so that every key that is seen has the same weight; and the value in each slot, of each
key/value head, is a vector with a single 1, at a place of its own. So a row of the result names what was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from judging import Judge
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.lab.cases import cdiv, make_metadata, slots_of
from stage04_kernels.lab.tolerances import TOLERANCES

SPARE_BLOCKS = 2  # blocks that nobody owns: the first and the last


@dataclass(frozen=True)
class Batch:
    """A step: (tokens in the cache, new tokens) of each request, and the shape of model and cache. The requests are called a, b, c."""

    requests: tuple[tuple[int, int], ...]
    block_size: int = 2
    num_heads: int = 1
    num_kv_heads: int = 1
    window: int | None = None
    padding: int = 0

    def __repr__(self) -> str:
        who = [
            f"{name(r)} has {cached or 'no'} {plural(cached, 'token')} in the cache and brings {new}"
            for r, (cached, new) in enumerate(self.requests)
        ]
        shape = [f"blocks of {self.block_size}"]
        shape += [f"{self.num_heads} query heads, {self.num_kv_heads} of keys and values"] * (self.num_heads > 1)
        shape += [f"a window of {self.window}"] * (self.window is not None)
        shape += [f"{self.padding} {plural(self.padding, 'row')} of padding"] * bool(self.padding)
        return f"{'; '.join(who)}; {', '.join(shape)}; block_table {self.tables}"

    @property
    def seq_lens(self) -> list[int]:
        """Each request's context, the new tokens included."""
        return [cached + new for cached, new in self.requests]

    @property
    def tables(self) -> list[list[int]]:
        """Each request's blocks. They are handed out in turn, from the end of the pool, so that no two lie in order."""
        needed = [cdiv(length, self.block_size) for length in self.seq_lens]
        free = list(range(1, 1 + sum(needed)))
        tables: list[list[int]] = [[] for _ in needed]
        for turn in range(max(needed)):
            for table, blocks in zip(tables, needed):
                table += [free.pop()] if turn < blocks else []
        return tables

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return sum(map(len, self.tables)) + SPARE_BLOCKS

    @property
    def num_tokens(self) -> int:
        """Query rows, padding included."""
        return sum(new for _, new in self.requests) + self.padding

    def metadata(self) -> AttentionMetadata:
        """The same, as a backend gets it. Entries of the block table that nobody needs are -1."""
        return make_metadata(
            [new for _, new in self.requests], self.seq_lens, self.tables, self.block_size, self.padding
        )

    def rows(self) -> list[tuple[int, int]]:
        """Request and position of each query row, padding excluded."""
        return [(r, cached + i) for r, (cached, new) in enumerate(self.requests) for i in range(new)]

    def slots(self, request: int) -> list[int]:
        """The slot of each position of a request."""
        return slots_of(self.tables[request], 0, self.seq_lens[request], self.block_size)

    def visible(self, position: int) -> list[int]:
        """The positions that a token at this position sees."""
        return list(range(0 if self.window is None else max(0, position + 1 - self.window), position + 1))

    def owner(self, slot: int) -> str:
        """Whose position lies in a slot."""
        for request in range(len(self.requests)):
            if slot in (own := self.slots(request)):
                return f"position {own.index(slot)} of {name(request)}"
        return f"slot {slot}, which is nobody's"


def plural(number: int, what: str) -> str:
    """row, rows"""
    return what if number == 1 else what + "s"


def name(number: int) -> str:
    """Of the request with this number: a, b, ..."""
    return chr(ord("a") + number)


@st.composite
def batches(draw: st.DrawFn, windows: bool = True, most_requests: int = 3, largest_group: int = 2) -> Batch:
    """Decodes, prompts and chunks of prompts, with grouped heads, windows and padding."""
    request = st.tuples(st.sampled_from([0, 1, 2, 3, 5]), st.sampled_from([1, 2, 3]))
    num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, largest_group))
    return Batch(
        tuple(draw(st.lists(request, min_size=1, max_size=most_requests))),
        draw(st.sampled_from([2, 4])), num_kv_heads * group, num_kv_heads,
        draw(st.one_of(st.none(), st.integers(1, 4))) if windows else None, draw(st.integers(0, 2)),
    )  # fmt: skip


def random_tensors(
    batch: Batch, head_dim: int = 2, size: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A query and a cache; slots outside every context hold NaN. The same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch.num_tokens, batch.num_heads, head_dim, generator=generator) * size
    shape = (2, batch.num_blocks * batch.block_size, batch.num_kv_heads, head_dim)
    cache = torch.full(shape, torch.nan)
    for request in range(len(batch.requests)):
        slots = batch.slots(request)
        cache[:, slots] = torch.randn(2, len(slots), *shape[2:], generator=generator)
    cache[0] *= size
    return query.to(dtype), cache.view(2, batch.num_blocks, batch.block_size, *shape[2:]).to(dtype)


def probe_tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    """A query of zeros and a cache whose values tell slot and head."""
    num_slots, heads = batch.num_blocks * batch.block_size, batch.num_kv_heads
    head_dim = num_slots * heads
    values = torch.eye(head_dim).view(batch.num_blocks, batch.block_size, heads, head_dim)
    return torch.zeros(batch.num_tokens, batch.num_heads, head_dim), torch.stack([torch.zeros_like(values), values])


@dataclass(frozen=True)
class Read:
    """What one row of the result was made of: the weight of each slot, and the key/value heads."""

    weights: dict[int, float]
    heads: set[int]


def decode(batch: Batch, row: Tensor) -> Read:
    """A row of the probe's result, [head_dim]. NaN counts as read."""
    places = [place for place, weight in enumerate(row.tolist()) if not abs(weight) < 1e-6]
    heads = {place % batch.num_kv_heads for place in places}
    return Read({place // batch.num_kv_heads: row[place].item() for place in places}, heads)


def check_shape(judge: Judge, result: Tensor, query: Tensor) -> None:
    """The result looks like the query. Judges of attention name the sentences of their contracts alike."""
    judge.holds("shape", isinstance(result, Tensor), "a tensor", type(result).__name__)
    judge.equal("shape", list(query.shape), list(result.shape))
    judge.equal("shape", query.dtype, result.dtype)


def check_reads(judge: Judge, batch: Batch, result: Tensor) -> None:
    """Every row of the probe's result names the right heads, slots and positions."""
    group = batch.num_heads // batch.num_kv_heads
    for row, (request, position) in enumerate(batch.rows()):
        for head in range(batch.num_heads):
            with judge.case(row=f"{row}, head {head}: the token of {name(request)} at position {position}"):
                read = decode(batch, result[row, head])
                check_slots(judge, batch, request, position, list(read.weights))
                judge.equal("group", f"key/value head {[head // group]}", f"key/value head {sorted(read.heads)}")
                weight = 1 / len(read.weights)
                even = all(abs(each - weight) < 1e-4 for each in read.weights.values())
                got = [round(each, 3) for each in read.weights.values()]
                judge.holds("softmax", even, f"the weight {weight:.3g} for each of them", f"the weights {got}")


def check_slots(judge: Judge, batch: Batch, request: int, position: int, read: list[int]) -> None:
    """These slots are what a token sees."""
    own, visible = batch.slots(request), batch.visible(position)
    expected = f"positions {visible} of {name(request)}"
    strange = [batch.owner(slot) for slot in read if slot not in own]
    judge.holds("table", not strange, expected, f"read: {', '.join(strange)}")
    positions = [own.index(slot) for slot in sorted(read, key=own.index)]
    causal = batch.window is None or max(positions, default=-1) != position
    judge.holds("causal" if causal else "window", positions == visible, expected, f"positions {positions}")


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Equal within the tolerance of the number format."""
    return torch.allclose(got, expected, rtol=TOLERANCES[dtype].rtol, atol=TOLERANCES[dtype].atol)


def shown(tensor: Tensor) -> str:
    """Rows of heads of numbers, as a reader writes them down."""
    return str([[[round(number, 4) for number in head] for head in row] for row in tensor.tolist()])
