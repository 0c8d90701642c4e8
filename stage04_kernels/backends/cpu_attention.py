"""Paged attention for CPUs, compiled (vLLM: csrc/cpu/attention.cpp and its paged attention for CPUs).

Each block of keys and values is read once, in place and in memory order: nothing is gathered or padded. numba compiles it,
rather than torch's C++: it comes as a wheel and needs no compiler on the machine, and the kernel stays Python that a debugger
can step through (NUMBA_DISABLE_JIT=1). The softmax is the online one that triton_kernels/paged_attention.py explains.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import (
    PrefillGather,
    attend_prefill,
    paged_attention_torch,
    plan_prefill,
    write_kv,
    write_then_attend,
)

os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")  # its threads sleep while they wait; OpenMP's may spin
import numba as nb

FAST = {
    "reassoc",
    "contract",
    "nsz",
    "arcp",
    "afn",
}  # all fast-math flags but the promise that no number is infinite
MAX_TOKENS = 4
"""With more query tokens of one request than this, gathering its keys once and multiplying matrices is faster. Measured with one
thread, GPT-2's 12 heads of 64, 8 requests with a context of 512: 2 tokens each take 2.1 ms here and 2.6 ms gathered, 4 tokens 2.8
and 2.7 ms, 8 tokens 5.9 and 3.8 ms."""


@nb.njit(fastmath=FAST, inline="always")
def _exp2(x: Any, power: Any, low: int, high: int, peak: float) -> None:
    """x[i] = 2 ** (x[i] - peak), for differences of at most 0. `math.exp` is a call per number; the compiler turns this into vector
    instructions: 2 ** whole by its bits, 2 ** rest by a polynomial (minimax of degree 5 on [0, 1), off by 2e-7 of the value at most)."""
    for i in range(low, high):
        difference = max(x[i] - peak, np.float32(-126.0))
        whole = np.floor(difference)
        rest = difference - whole
        poly = np.float32(1.8775767e-3)
        for coefficient in (8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1):
            poly = poly * rest + np.float32(coefficient)
        power[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        x[i] = poly
    factor = power.view(np.float32)
    for i in range(low, high):
        x[i] *= factor[i]


@nb.njit(fastmath=FAST, inline="always")
def _score(
    scores: Any, query: Any, keys: Any, first_head: int, num_heads: int, first_key: int, num_keys: int, scale: float
) -> None:
    """scores[row, key] = query . key, scaled, for the keys first_key to num_keys of a block. In memory order: a block is read
    from its first byte to its last."""
    group = query.shape[1] // keys.shape[1]
    rows_per_head = len(query) * group
    for key in range(first_key, num_keys):
        for head in range(num_heads):
            for row in range(rows_per_head):
                token, query_head = row // group, (first_head + head) * group + row % group
                score = np.float32(0.0)
                for dim in range(query.shape[2]):
                    score += query[token, query_head, dim] * keys[key, first_head + head, dim]
                scores[head * rows_per_head + row, key] = score * np.float32(scale)


@nb.njit(fastmath=FAST, inline="always")
def _softmax_step(scores: Any, power: Any, mixed: Any, largest: Any, total: Any, row: int, low: int, high: int) -> None:
    """One row's scores of the keys low to high become weights, relative to the largest score so far; what the row has summed over
    earlier blocks is rescaled to match."""
    peak = max(largest[row], scores[row, low:high].max())
    rescale = np.float32(2.0 ** (largest[row] - peak))
    _exp2(scores[row], power, low, high, peak)
    total[row] = total[row] * rescale + scores[row, low:high].sum()
    largest[row] = peak
    if rescale < 1.0:
        for dim in range(mixed.shape[1]):
            mixed[row, dim] *= rescale


@nb.njit(fastmath=FAST, inline="always")
def _mix(mixed: Any, scores: Any, values: Any, first_head: int, num_heads: int, first_key: int, num_keys: int) -> None:
    """mixed[row] += weight * value, over the keys first_key to num_keys of a block, in memory order."""
    rows_per_head = len(mixed) // num_heads
    for key in range(first_key, num_keys):
        for head in range(num_heads):
            for row in range(head * rows_per_head, (head + 1) * rows_per_head):
                weight = scores[row, key]
                for dim in range(mixed.shape[1]):
                    mixed[row, dim] += weight * values[key, first_head + head, dim]


@nb.njit(fastmath=FAST, inline="always")
def _attend_heads(
    out: Any,  # [tokens, num_heads, head_dim] float32: of one request
    query: Any,  # the same shape
    keys: Any,  # [num_blocks, block_size, num_kv_heads, head_dim] float32
    values: Any,
    blocks: Any,  # [max_blocks] int32: the request's
    seq_len: int,
    scale: float,
    window: int,  # 0 = none
    first_head: int,  # of the key/value heads to compute
    num_heads: int,
) -> None:
    """One request, some of its key/value heads, from its first visible block to its last."""
    block_size, tokens, head_dim = keys.shape[1], len(query), query.shape[2]
    group = query.shape[1] // keys.shape[2]
    before = seq_len - tokens  # positions before the first of these tokens
    # Row (head, token, member): a key/value head, a token, one of the query heads that share that head.
    rows = num_heads * tokens * group
    scores, power = np.empty((rows, block_size), np.float32), np.empty(block_size, np.int32)
    mixed = np.zeros((rows, head_dim), np.float32)
    largest, total = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
    begin = max(0, before + 1 - window) if window > 0 else 0
    for block_index in range(begin // block_size, (seq_len - 1) // block_size + 1):
        block, position = blocks[block_index], block_index * block_size  # of the block's first key
        first_key, num_keys = max(0, begin - position), min(block_size, seq_len - position)
        _score(scores, query, keys[block], first_head, num_heads, first_key, num_keys, scale)
        for row in range(rows):
            last = before + row // group % tokens  # the position of this row's token
            low = max(first_key, last + 1 - window - position) if window > 0 else 0
            high = min(num_keys, last + 1 - position)
            scores[row, first_key:low] = 0.0
            scores[row, max(high, 0) : num_keys] = 0.0
            if low < high:
                _softmax_step(scores, power, mixed, largest, total, row, low, high)
        _mix(mixed, scores, values[block], first_head, num_heads, first_key, num_keys)
    for row in range(rows):
        query_head = (first_head + row // (tokens * group)) * group + row % group
        for dim in range(head_dim):
            out[row // group % tokens, query_head, dim] = mixed[row, dim] / total[row]


@nb.njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
def _attend(
    out: Any,  # [num_tokens, num_heads, head_dim] float32
    query: Any,  # the same shape
    keys: Any,  # [num_blocks, block_size, num_kv_heads, head_dim] float32
    values: Any,
    block_table: Any,  # [num_reqs, max_blocks] int32
    seq_lens: Any,  # [num_reqs] int32
    query_start_loc: Any,  # [num_reqs + 1] int32
    requests: Any,  # [num_requests] int32: those to compute
    scale: float,
    window: int,  # 0 = none
    heads_per_item: int,  # key/value heads per item of work
) -> None:
    """An item of work is a request and some of its key/value heads; threads share the items."""
    num_kv_heads = keys.shape[2]
    items_per_request = -(-num_kv_heads // heads_per_item)
    for item in nb.prange(len(requests) * items_per_request):
        request, first_head = requests[item // items_per_request], item % items_per_request * heads_per_item
        start, end = query_start_loc[request], query_start_loc[request + 1]
        _attend_heads(
            out[start:end], query[start:end], keys, values, block_table[request], seq_lens[request], scale, window,
            first_head, min(heads_per_item, num_kv_heads - first_head),
        )  # fmt: skip


@dataclass(frozen=True)
class CPUPlan:
    """The requests with few query tokens, int32 [num_requests]; and the others, whose many rows are worth a matrix product."""

    requests: np.ndarray
    prefills: list[PrefillGather]


def plan(metadata: AttentionMetadata, block_size: int, window: int | None) -> CPUPlan:
    """Which requests take which path."""
    requests, prefills = [], []
    for request, (start, end) in enumerate(pairwise(metadata.query_start_loc_cpu)):
        if end - start > MAX_TOKENS:
            prefills.append(plan_prefill(metadata, request, window, block_size))
        elif end > start:
            requests.append(request)
    return CPUPlan(np.array(requests, dtype=np.int32), prefills)


def paged_attention_cpu(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Attention over the paged cache, compiled. Arguments as in `AttentionBackend`; float32 on a CPU, anything else goes to the torch
    path. Padding rows of the query come out as zeros."""
    if query.dtype != torch.float32 or query.device.type != "cpu":
        return paged_attention_torch(query, kv_cache, metadata, scale, window)
    nb.set_num_threads(min(torch.get_num_threads(), nb.config.NUMBA_NUM_THREADS))
    block_size, num_kv_heads = kv_cache.shape[2:4]
    key = ("cpu", block_size, window)
    if key not in metadata.plans:
        metadata.plans[key] = plan(metadata, block_size, window)
    planned: CPUPlan = metadata.plans[key]
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if len(planned.requests):
        # Few requests: split by heads too, so that every thread has work.
        items_per_request = min(num_kv_heads, -(-2 * nb.get_num_threads() // len(planned.requests)))
        _attend(
            out.numpy(), query.contiguous().numpy(), kv_cache[0].numpy(), kv_cache[1].numpy(), metadata.block_table.numpy(),
            metadata.seq_lens.numpy(), metadata.query_start_loc.numpy(), planned.requests,
            scale * math.log2(math.e), window or 0, -(-num_kv_heads // items_per_request),
        )  # fmt: skip
    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()  # [num_slots, num_kv_heads, head_dim]
    for prefill in planned.prefills:
        out[prefill.start : prefill.end] = attend_prefill(
            query[prefill.start : prefill.end], keys, values, prefill, scale
        )
    return out


cpu_attention = write_then_attend(write_kv, paged_attention_cpu)
