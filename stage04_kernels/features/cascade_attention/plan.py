"""Which requests of a step share their first blocks, and whether it pays to read these once (vLLM: use_cascade_attention in
v1/attention/backends/flash_attn.py, get_num_common_prefix_blocks in v1/core/kv_cache_manager.py).

The blocks themselves say it: two requests share what they began with if their block tables begin with the same numbers. So the
scheduler decides nothing here. This file needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.sampler import to_device

KEY = "cascade_attention"  # of the plan in `AttentionMetadata.plans`
MIN_REQUESTS = 8
MIN_TOKENS = 256
"""Fewer are not worth the second pass whatever they save (vLLM's bounds too)."""
LAUNCHES_BYTES = 100_000_000
"""What a GPU reads from memory (4.8 TB/s) in the 20 us that a layer's two more launches take. Predicted, not measured yet."""
RECORDING_BYTES = 500_000_000
"""The same for a step that would be replayed as a CUDA graph, which has no cascade: launching a layer kernel by kernel takes some
100 us. Predicted, not measured yet."""


@dataclass(frozen=True)
class SharedPrefix:
    """The first `num_blocks` blocks of these requests are the same ones, and every query token of theirs comes after them."""

    requests: list[int]
    num_blocks: int


@dataclass(frozen=True)
class CascadePlan:
    """What one step reads together, on the device. The metadata of its own part is a step like any other: contexts without what is shared."""

    prefixes: list[SharedPrefix]
    prefix_table: Tensor  # [num_prefixes, most blocks] int32
    prefix_lens: Tensor  # [num_prefixes] int32, in tokens
    rows: Tensor  # [num_rows] int32: the query rows of the first prefix, of the second, ...
    rows_per_prefix: list[int]
    max_prefix_len: int
    own: AttentionMetadata
    tiles: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """Query tokens per tile -> (prefix, first and last + 1 in `rows`) of each tile, int32 [num_tiles]; made once for all layers."""


def find_shared_prefixes(
    block_table: np.ndarray, computed: np.ndarray, block_size: int, min_requests: int = MIN_REQUESTS,
    min_tokens: int = MIN_TOKENS,
) -> list[SharedPrefix]:  # fmt: skip
    """Groups of `min_requests` requests or more that share `min_tokens` tokens or more, each request in one group at most.

    block_table  [num_reqs, max_blocks] int32, on the host; request r has `computed[r]` tokens in the cache before this step

    Of those that begin as one request does, the longest part that many share or the shorter one that more share: whatever saves most reads.
    """
    found: list[SharedPrefix] = []
    full = computed // block_size  # blocks that lie before every query token of a request
    column, least = max(0, -(-min_tokens // block_size) - 1), max(2, min_requests)
    left = _crowd(np.flatnonzero(full * block_size >= min_tokens), block_table, column, least)
    while len(left):
        first, together = left[0], left[block_table[left, 0] == block_table[left[0], 0]]
        depth = int(full[first])
        same = block_table[together, :depth] == block_table[first, :depth]
        lengths = np.where(same.all(1), depth, same.argmin(1))
        lengths = np.minimum(lengths, full[together])
        order = np.argsort(-lengths, kind="stable")  # `together[order[:n]]` share `lengths[order[n - 1]]` blocks
        shared = lengths[order]
        numbers = np.arange(1, len(order) + 1)
        allowed = (numbers >= least) & (shared * block_size >= min_tokens)
        saved = np.where(allowed, (numbers - 1) * shared, 0)
        count = int(saved.argmax()) + 1
        taken = together[order[:count]] if saved.any() else left[:1]
        if saved.any():
            found.append(SharedPrefix(sorted(taken.tolist()), int(shared[count - 1])))
        left = _crowd(np.setdiff1d(left, taken), block_table, column, least)
    return found


def _crowd(requests: np.ndarray, block_table: np.ndarray, column: int, least: int) -> np.ndarray:
    """Those whose block in this column `least` of them have: nobody else shares so much. In most steps that is nobody, and the host has nothing more to do."""
    if len(requests) < least:  # then the table may have fewer columns
        return requests[:0]
    _, which, counts = np.unique(block_table[requests, column], return_inverse=True, return_counts=True)
    return requests[counts[which] >= least]


def saved_bytes(prefixes: list[SharedPrefix], block_bytes: int) -> int:
    """What one layer no longer reads; `block_bytes`: of keys and values of a block in one layer."""
    return sum((len(prefix.requests) - 1) * prefix.num_blocks for prefix in prefixes) * block_bytes


def make_plan(
    prefixes: list[SharedPrefix], block_table: np.ndarray, metadata: AttentionMetadata, block_size: int
) -> CascadePlan:
    """The plan for a step with these prefixes; `block_table` is the metadata's, on the host."""
    starts = metadata.query_start_loc_cpu
    blocks = np.zeros(len(block_table), dtype=np.int64)  # of each request, that are read with others
    rows: list[int] = []
    counts: list[int] = []
    table = np.zeros((len(prefixes), max(p.num_blocks for p in prefixes)), dtype=np.int32)
    for number, prefix in enumerate(prefixes):
        blocks[prefix.requests] = prefix.num_blocks
        table[number, : prefix.num_blocks] = block_table[prefix.requests[0], : prefix.num_blocks]
        before = len(rows)
        rows += [row for request in prefix.requests for row in range(starts[request], starts[request + 1])]
        counts.append(len(rows) - before)
    shared = blocks * block_size
    seq_lens = np.array(metadata.seq_lens_cpu) - shared
    columns = np.arange(-(-int(seq_lens.max()) // block_size)) + blocks[:, None]
    own_table = np.take_along_axis(block_table, np.minimum(columns, block_table.shape[1] - 1), axis=1)
    prefix_lens = np.array([prefix.num_blocks * block_size for prefix in prefixes], dtype=np.int32)
    arrays = [table, prefix_lens, np.array(rows, dtype=np.int32), own_table.astype(np.int32), seq_lens.astype(np.int32)]
    prefix_table, lens, row_tensor, own_blocks, own_lens = to_device(arrays, metadata.block_table.device)
    own = replace(
        metadata, seq_lens=own_lens, block_table=own_blocks, seq_lens_cpu=seq_lens.tolist(), max_seq_len=int(seq_lens.max())
    )  # fmt: skip
    return CascadePlan(prefixes, prefix_table, lens, row_tensor, counts, int(prefix_lens.max()), own)


def cut_rows(plan: CascadePlan, tokens_per_tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of `plan.rows` that hold rows of one prefix each."""
    if tokens_per_tile not in plan.tiles:
        tiles: list[tuple[int, int, int]] = []
        begin = 0
        for number, count in enumerate(plan.rows_per_prefix):
            end = begin + count
            tiles += [
                (number, first, min(first + tokens_per_tile, end)) for first in range(begin, end, tokens_per_tile)
            ]
            begin = end
        columns = np.array(tiles, dtype=np.int32).T.copy()
        prefix, first, last = to_device(list(columns), plan.rows.device)
        plan.tiles[tokens_per_tile] = prefix, first, last
    return plan.tiles[tokens_per_tile]


def cascade_attention_torch(query: Tensor, kv_cache: Tensor, plan: CascadePlan, scale: float) -> Tensor:
    """The slow twin: one query row and head after another, in float32. Arguments as in `AttentionBackend`.

    A softmax over keys A and B is the average of the softmax over A and that over B, each weighted by its sum of exponentials; of these sums one
    keeps the logarithms (log-sum-exp).
    """
    out = torch.zeros(query.shape)
    keys, values = kv_cache.float().flatten(1, 2).unbind()  # [num_slots, num_kv_heads, head_dim]
    block_size, group = kv_cache.shape[2], query.shape[1] // kv_cache.shape[3]
    prefix_of = {request: number for number, prefix in enumerate(plan.prefixes) for request in prefix.requests}
    starts = plan.own.query_start_loc_cpu

    def attend(row: int, head: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length)
        slots = blocks.cpu()[positions // block_size].long() * block_size + positions % block_size
        scores = keys[slots, head // group] @ query[row, head].float() * scale
        return scores.softmax(0) @ values[slots, head // group], scores.logsumexp(0)

    for request, context in enumerate(plan.own.seq_lens_cpu):
        for row in range(starts[request], starts[request + 1]):
            seen = context - (starts[request + 1] - 1 - row)
            for head in range(query.shape[1]):
                parts = [attend(row, head, plan.own.block_table[request], seen)]
                if (number := prefix_of.get(request)) is not None:
                    length = int(plan.prefix_lens[number])
                    parts.append(attend(row, head, plan.prefix_table[number], length))
                weights = torch.stack([lse for _, lse in parts]).softmax(0)
                out[row, head] = sum(weight * part for weight, (part, _) in zip(weights, parts))
    return out.to(query.dtype)
