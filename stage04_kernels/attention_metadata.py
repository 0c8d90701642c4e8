"""What attention must know about a batch (vLLM: FlashAttentionMetadata in v1/attention/backends/flash_attn.py).

One step of the engine builds one AttentionMetadata, and every layer of the model uses it. So whatever follows from the
metadata alone is computed once, in `gather_plan`, and not again in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CPU_GROUP_POSITIONS = 1024
"""Most padded positions that one group of decodes gathers on a CPU: what is gathered should stay in the processor's cache
until it is read. Measured with one thread, GPT-2's 12 heads of 64, 64 decodes with 1 to 500 tokens of context: a layer took
99 ms with one group, 7 ms with groups of this size."""


@dataclass(frozen=True)
class DecodeGather:
    """Some requests with one query token, padded to the longest of their contexts."""

    rows: Tensor  # [num_decodes] int64: their rows in the query
    slots: Tensor  # [num_decodes * max_context] int64: which cache slot each padded position reads
    mask: Tensor  # [num_decodes, 1, 1, max_context] bool: True where the position is real


@dataclass(frozen=True)
class PrefillGather:
    """One request with several query tokens: a prompt, or a chunk of one."""

    start: int  # its query rows are start..end-1
    end: int
    slots: Tensor  # [visible] int64: from the first position that any of these tokens sees to the last
    mask: Tensor | None  # [end - start, visible] bool; None: nothing came before, plain causal attention


@dataclass(frozen=True)
class GatherPlan:
    """Which cache slots the torch backend reads for a batch, and what is masked."""

    decodes: list[DecodeGather]
    prefills: list[PrefillGather]


def group_by_length(requests: list[int], seq_lens: list[int], max_positions: int) -> list[list[int]]:
    """Put requests of similar length together, so that little is padded, and at most `max_positions` padded positions
    into a group; a longer request is a group of its own."""
    groups: list[list[int]] = []
    for request in sorted(requests, key=lambda r: seq_lens[r], reverse=True):
        if groups and (len(groups[-1]) + 1) * seq_lens[groups[-1][0]] <= max_positions:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


@dataclass
class AttentionMetadata:
    """The batch of one step: which query rows belong to which request, and where its keys and values lie.

    Query rows `query_start_loc[r]` to `query_start_loc[r + 1] - 1` are the tokens of request r in this step. Its context
    is `seq_lens[r]` tokens long, these included. Position p of the context lies in block `block_table[r, p // block_size]`
    at offset `p % block_size`; entries behind the last needed block are never read. Rows behind the last request are padding.

    The two `_cpu` lists repeat the tensors on the host, so that host code never waits for a device to answer.
    """

    query_start_loc: Tensor  # [num_reqs + 1] int32
    seq_lens: Tensor  # [num_reqs] int32
    block_table: Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens] int64: where each row's key and value go; -1 = padding
    query_start_loc_cpu: list[int]
    seq_lens_cpu: list[int]
    max_query_len: int
    max_seq_len: int
    _plans: dict[tuple[int, int | None], GatherPlan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _other_plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def gather_plan(self, block_size: int, window: int | None = None) -> GatherPlan:
        """The plan of the torch backend for this batch and this sliding window, computed on the first call only."""
        if (block_size, window) not in self._plans:
            self._plans[block_size, window] = self._make_plan(block_size, window)
        return self._plans[block_size, window]

    def cached_plan(self, key: Any, make: Callable[[], Any]) -> Any:
        """The plan of another backend, computed on the first call with this key only."""
        if key not in self._other_plans:
            self._other_plans[key] = make()
        return self._other_plans[key]

    def _make_plan(self, block_size: int, window: int | None) -> GatherPlan:
        query_lens = [end - start for start, end in pairwise(self.query_start_loc_cpu)]
        decodes = [request for request, query_len in enumerate(query_lens) if query_len == 1]
        prefills = [request for request, query_len in enumerate(query_lens) if query_len > 1]
        # A GPU has the memory bandwidth for one large group, and pays for each launch.
        limit = CPU_GROUP_POSITIONS if self.block_table.device.type == "cpu" else len(decodes) * self.max_seq_len
        visible = [length if window is None else min(length, window) for length in self.seq_lens_cpu]
        groups = group_by_length(decodes, visible, limit)
        return GatherPlan(
            [self._plan_decodes(group, visible, block_size) for group in groups],
            [self.plan_prefill(request, window, block_size) for request in prefills],
        )

    # Invariant: every padded position reads the last token of its own request. A masked score gets weight 0, but 0 times
    # what another request or nobody wrote may be NaN, so even masked positions must read numbers that are the request's own.
    def _plan_decodes(self, requests: list[int], visible: list[int], block_size: int) -> DecodeGather:
        """`requests` begins with the one that sees most. Request r sees its last `visible[r]` positions."""
        device = self.block_table.device
        chosen = torch.tensor(requests, device=device)  # [num_decodes]
        rows = torch.tensor([self.query_start_loc_cpu[r] for r in requests], device=device)
        lengths = torch.tensor([visible[r] for r in requests], device=device)[:, None]
        first = torch.tensor([self.seq_lens_cpu[r] - visible[r] for r in requests], device=device)[:, None]
        offsets = torch.arange(visible[requests[0]], device=device)  # [max_context]
        own = first + torch.minimum(offsets, lengths - 1)  # [num_decodes, max_context] positions
        blocks = self.block_table[chosen].long().gather(1, own // block_size)
        slots = blocks * block_size + own % block_size
        return DecodeGather(rows, slots.flatten(), (offsets < lengths)[:, None, None, :])

    def plan_prefill(self, request: int, window: int | None, block_size: int) -> PrefillGather:
        """Which slots one request with several query tokens reads, and what is masked."""
        device = self.block_table.device
        start, end = self.query_start_loc_cpu[request], self.query_start_loc_cpu[request + 1]
        query_len, context = end - start, self.seq_lens_cpu[request]
        window = context if window is None else window
        first_visible = max(0, context - query_len + 1 - window)  # of the first query token
        positions = torch.arange(first_visible, context, device=device)
        slots = self.block_table[request].long()[positions // block_size] * block_size + positions % block_size
        if query_len == context <= window:
            return PrefillGather(start, end, slots, None)
        last_visible = torch.arange(context - query_len, context, device=device)[:, None]  # of each query token
        mask = (positions <= last_visible) & (positions > last_visible - window)
        return PrefillGather(start, end, slots, mask)
