"""Random batches for checks, tests and benchmarks of attention. vLLM builds similar ones in tests/kernels/attention.

Every slot of the cache that no request owns holds NaN. Reading one of them, even under a mask, shows in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata


@dataclass
class AttentionCase:
    """Arguments for one call of `attention`."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    key: Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor
    kv_cache: Tensor  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    metadata: AttentionMetadata
    scale: float
    window: int | None = None


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def random_block_table(
    computed: list[int], seq_lens: list[int], block_size: int, num_shared: int, generator: torch.Generator
) -> tuple[list[list[int]], int]:
    """Blocks of each request, in random places, and the size of the pool.

    The first `num_shared` blocks of each request are the same ones, as far as its computed context fills them. One block
    in the pool belongs to nobody, and it is the last one, where an index of -1 would lead.
    """
    needed = [cdiv(length, block_size) for length in seq_lens]
    shared = [min(num_shared, length // block_size) for length in computed]
    pool_size = num_shared + sum(needed) + 1
    free = torch.randperm(pool_size - 1, generator=generator).tolist()
    common = [free.pop() for _ in range(num_shared)]
    tables = [common[:s] + [free.pop() for _ in range(n - s)] for n, s in zip(needed, shared)]
    return tables, pool_size


def slots_of(block_ids: list[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of the positions start..end-1 of a request."""
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)]


def make_metadata(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], block_size: int, num_padding: int = 0
) -> AttentionMetadata:
    """Metadata from plain lists. Unused entries of the block table are -1; padding rows come last."""
    width = max(len(table) for table in tables)
    slots: list[int] = []
    for query_len, seq_len, table in zip(query_lens, seq_lens, tables):
        slots += slots_of(table, seq_len - query_len, seq_len, block_size)
    starts = [sum(query_lens[:request]) for request in range(len(query_lens) + 1)]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * num_padding, dtype=torch.int64),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def make_attention_case(
    query_lens: list[int],
    computed: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_shared: int = 0,
    num_padding: int = 0,
    window: int | None = None,
    seed: int = 0,
) -> AttentionCase:
    """A batch in which request r has `computed[r]` tokens in the cache and brings `query_lens[r]` new ones. With a sliding
    window, positions that none of these sees are NaN too (unless blocks are shared: another request may see them)."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [c + q for c, q in zip(computed, query_lens)]
    tables, num_blocks = random_block_table(computed, seq_lens, block_size, num_shared, generator)
    kv_shape = (num_kv_heads, head_dim)
    kv_cache = torch.full((2, num_blocks * block_size, *kv_shape), torch.nan, dtype=dtype)
    for table, length in zip(tables, computed):
        seen_from = max(0, length + 1 - window) if window is not None and num_shared == 0 else 0
        slots = slots_of(table, seen_from, length, block_size)
        kv_cache[:, slots] = torch.randn(2, len(slots), *kv_shape, generator=generator).to(dtype)
    num_tokens = sum(query_lens) + num_padding
    return AttentionCase(
        query=torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype),
        key=torch.randn(num_tokens, *kv_shape, generator=generator).to(dtype),
        value=torch.randn(num_tokens, *kv_shape, generator=generator).to(dtype),
        kv_cache=kv_cache.view(2, num_blocks, block_size, *kv_shape),
        metadata=make_metadata(query_lens, seq_lens, tables, block_size, num_padding),
        scale=head_dim**-0.5,
        window=window,
    )
