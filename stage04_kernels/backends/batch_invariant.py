"""Arithmetic that does not depend on the batch (vLLM: VLLM_BATCH_INVARIANT, model_executor/determinism/batch_invariant.py).

Floating-point sums depend on their order, and fast kernels choose the order by the shape of the batch. So a token's logits
change in their last bits with the rest of the batch. Two rules prevent that. Every call has the same number of rows, ROWS, so
that every kernel takes the same path; and the attention of one token runs through its context in steps of SPLIT positions, in
order, whatever the other tokens do. Source: He et al. 2025, "Defeating Nondeterminism in LLM Inference".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import starmap

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part, finish, merge_parts
from stage04_kernels.paged_attention import write_kv, write_then_attend

ROWS = 16  # even row widths then fill whole vectors of 32 numbers: no element is left over for a slower loop that rounds differently
SPLIT = 64


@dataclass(frozen=True)
class RowTile:
    """ROWS query rows, each with a context of its own; the last real row is repeated to fill the tile."""

    start: int  # the real ones are start..end-1 in the query
    end: int
    rows: Tensor  # [ROWS] int64
    splits: list[tuple[Tensor, Tensor]]  # slots [ROWS * SPLIT] int64, mask [ROWS, 1, 1, SPLIT] bool: True = visible


def rows_of(metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """For each query row except padding: its request, and how many positions it sees. Two [num_rows] int64."""
    ends = metadata.query_start_loc[1:].long()
    lengths = ends - metadata.query_start_loc[:-1]
    requests = torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths)
    rows = torch.arange(len(requests), device=ends.device)
    return requests, metadata.seq_lens.long()[requests] - (ends[requests] - 1 - rows)


def plan_tiles(metadata: AttentionMetadata, block_size: int, window: int | None) -> Iterator[RowTile]:
    """Which slots each row reads, tile by tile and split by split."""
    requests, visible = rows_of(metadata)
    first = (visible - window).clamp(min=0) if window is not None else torch.zeros_like(visible)
    offsets = torch.arange(SPLIT, device=visible.device)
    for start in range(0, len(requests), ROWS):
        end = min(start + ROWS, len(requests))
        rows = torch.arange(start, start + ROWS, device=visible.device).clamp(max=end - 1)
        table = metadata.block_table[requests[rows]].long()  # [ROWS, max_blocks]
        begin, last = first[rows, None], visible[rows, None] - 1  # [ROWS, 1]
        splits = []
        for ahead in range(0, int((last - begin).max()) + 1, SPLIT):
            positions = begin + ahead + offsets  # [ROWS, SPLIT]
            # a masked position reads the row's own last token, never another request's NaN
            own = torch.minimum(positions, last)
            slots = table.gather(1, own // block_size) * block_size + own % block_size
            splits.append((slots.flatten(), (positions <= last)[:, None, None, :]))
        yield RowTile(start, end, rows, splits)


def paged_attention_batch_invariant(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Paged attention in which a row's result is a function of its query and its context alone. Arguments as in
    `AttentionBackend`.

    Padding rows of the query come out as zeros.
    """
    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()  # [num_slots, num_kv_heads, head_dim]
    key = ("batch_invariant", kv_cache.shape[2], window)
    if key not in metadata.plans:
        metadata.plans[key] = list(plan_tiles(metadata, kv_cache.shape[2], window))
    output = torch.zeros_like(query)
    for tile in metadata.plans[key]:
        result = _attend(query[tile.rows], keys, values, tile.splits, scale)
        output[tile.start : tile.end] = result[: tile.end - tile.start]
    return output


# Invariant: a split in which a row sees nothing leaves a part that changes no bit of the others. So it does not matter how long the
# contexts of the other rows in the tile are.
def _attend(query: Tensor, keys: Tensor, values: Tensor, splits: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """query [ROWS, num_heads, head_dim] -> the same shape; computed in float32, split after split."""
    num_kv_heads, head_dim = keys.shape[1:]
    q = query.float().unflatten(1, (num_kv_heads, -1))  # [ROWS, kv_heads, group, head_dim]
    padded = (len(query), SPLIT, num_kv_heads, head_dim)

    def part(slots: Tensor, mask: Tensor) -> SoftmaxPart:
        k = keys.index_select(0, slots).view(padded).permute(0, 2, 3, 1).float()  # [ROWS, kv_heads, head_dim, SPLIT]
        v = values.index_select(0, slots).view(padded).transpose(1, 2).float()  # [ROWS, kv_heads, SPLIT, head_dim]
        return attend_part((q @ k * scale).masked_fill(~mask, -torch.inf), v)

    return finish(reduce(merge_parts, starmap(part, splits))).flatten(1, 2).to(query.dtype)


batch_invariant_attention = write_then_attend(write_kv, paged_attention_batch_invariant)
