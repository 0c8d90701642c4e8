"""CUDA graphs, and decode steps recorded whole (vllm/v1/worker/gpu_model_runner.py, capture_model; vllm/compilation/cuda_graph.py).

A decode step of a small model is a few hundred kernels of a few microseconds each, and launching each costs the CPU as much. A
graph is recorded once and launched as one. It repeats the same kernels on the same memory, so a step copies its inputs into fixed
tensors, and its batch is padded to the next recorded size. `--enforce-eager` switches it off; the tokens are the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stage03_engine.core.features.cuda_graphs.modes import WARM_UPS
from stage04_kernels.attention import AttentionMetadata

Run = Callable[[], Tensor]
Capture = Callable[[Run], Run]
"""Record what a function does; the result does it again and returns the same tensor."""
Replay = Callable[[], None]


class Graphs(Protocol):
    """What records: CUDA graphs, or their rules on a CPU (simulated.py)."""

    def session(self) -> AbstractContextManager[None]:
        """Graphs are recorded in here."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run it a few times before it is recorded: kernels are compiled, the allocator's pools filled."""

    def begin(self) -> None:
        """From now on what runs is recorded."""

    def end(self) -> Replay:
        """What ran since `begin`, to be run again."""


class CudaGraphs:
    """All graphs share one pool of memory: they never run at the same time, so a smaller one finds room in what the largest took."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._open: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """On a stream of its own. Python's garbage waits, because no memory of the device may be freed while a graph is recorded."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream())
        was = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    if self._open is not None:  # something was raised while it was recorded
                        self.end()  # CUDA allows it on this stream alone
            torch.cuda.current_stream().wait_stream(self._stream)
        finally:
            if was:
                gc.enable()

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Outside of the graph."""
        for _ in range(WARM_UPS):
            run()

    def begin(self) -> None:
        """From now on what is launched is recorded, and not run."""
        self._open = torch.cuda.CUDAGraph()
        self._open.capture_begin(pool=self._pool)

    def end(self) -> Replay:
        """The graph of what was launched since `begin`."""
        graph, self._open = self._open, None
        assert graph is not None
        graph.capture_end()
        replay: Replay = graph.replay
        return replay


def whole(graphs: Graphs, run: Run) -> Run:
    """`run` as one graph."""
    with graphs.session():
        graphs.warm_up(run)
        graphs.begin()
        output = run()
        replay = graphs.end()

    def again() -> Tensor:
        replay()
        return output

    again.replays = [replay]  # type: ignore[attr-defined]
    return again


@dataclass
class _Recorded:
    """One batch size: the tensors that a step fills, and what runs on them."""

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    run: Run
    replay: Run


class DecodeGraphs:
    """The model's forward pass over batches in which every request has one token."""

    def __init__(
        self, model: Callable[..., Tensor], kv_caches: list[Tensor], max_blocks: int, max_model_len: int,
        sizes: list[int], device: torch.device, capture: Capture,
    ) -> None:  # fmt: skip
        self._recorded: dict[int, _Recorded] = {}
        for size in sorted(sizes, reverse=True):  # the largest first: the others find its memory
            metadata = _fixed_metadata(size, max_blocks, max_model_len, device)
            input_ids = torch.zeros(size, dtype=torch.int64, device=device)
            positions = torch.zeros_like(input_ids)

            def run(ids: Tensor = input_ids, at: Tensor = positions, fixed: AttentionMetadata = metadata) -> Tensor:
                return model(ids, at, kv_caches, fixed)

            self._recorded[size] = _Recorded(input_ids, positions, metadata, run, capture(run))

    @property
    def largest(self) -> int:
        """The most requests of a step that was recorded."""
        return max(self._recorded, default=0)

    def fits(self, metadata: AttentionMetadata) -> bool:
        """One token per request, and not more requests than were recorded for?"""
        return metadata.max_query_len == 1 and len(metadata.seq_lens_cpu) <= self.largest

    def size_of(self, count: int) -> int:
        """The size to which a batch of so many requests is padded."""
        return min(size for size in self._recorded if size >= count)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """As the model's own. The result is overwritten by the next step."""
        count = len(input_ids)
        recorded = self._recorded[self.size_of(count)]
        fixed = recorded.metadata
        recorded.input_ids[:count] = input_ids
        recorded.positions[:count] = positions
        fixed.seq_lens[:count] = metadata.seq_lens
        fixed.seq_lens[count:] = 1  # padding rows read one token of the null block, and write nothing
        fixed.block_table[:count, : metadata.block_table.shape[1]] = metadata.block_table
        fixed.block_table[count:] = 0
        fixed.slot_mapping[:count] = metadata.slot_mapping
        fixed.slot_mapping[count:] = -1
        return recorded.replay()[:count]


def _fixed_metadata(size: int, max_blocks: int, max_model_len: int, device: torch.device) -> AttentionMetadata:
    """What the recording sees. The longest context decides how the kernel splits its work: a graph cannot change it later."""
    starts = list(range(size + 1))
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.ones(size, dtype=torch.int32, device=device),
        block_table=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
        query_start_loc_cpu=starts,
        seq_lens_cpu=[max_model_len] * size,
        max_query_len=1,
        max_seq_len=max_model_len,
    )


def free_bytes() -> int:
    """Free memory of the device, what the allocator keeps for later included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
