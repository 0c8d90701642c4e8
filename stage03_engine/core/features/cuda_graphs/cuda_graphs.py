"""CUDA graphs for decode steps (vllm/v1/worker/gpu_model_runner.py, capture_model; vllm/compilation/cuda_graph.py).

A decode step of a small model is a few hundred kernels of a few microseconds each, and launching each costs the CPU as much. A
graph is recorded once and launched as one. It repeats the same kernels on the same memory, so a step copies its inputs into fixed
tensors, and its batch is padded to the next recorded size. `--enforce-eager` switches it off; the tokens are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage04_kernels.attention import AttentionMetadata
from stagetrace import trace

Run = Callable[[], Tensor]
Capture = Callable[[Run], Run]
"""Record what a function does; the result does it again and returns the same tensor."""


class GraphCapture:
    """Records CUDA graphs that share one pool of memory: they never run at the same time, so a smaller one finds room in what the
    largest took."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, run: Run) -> Run:
        """The first two runs are outside of the graph: they compile kernels and fill the allocator's pools."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, then every 8th."""
    return [size for size in (1, 2, 4, *range(8, 513, 8)) if size < max_num_seqs] + [min(max_num_seqs, 512)]


@dataclass
class _Recorded:
    """One batch size: the tensors that a step fills, and what runs on them."""

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
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

            self._recorded[size] = _Recorded(input_ids, positions, metadata, capture(run))

    def fits(self, metadata: AttentionMetadata) -> bool:
        """One token per request, and not more requests than were recorded for?"""
        return metadata.max_query_len == 1 and len(metadata.seq_lens_cpu) <= max(self._recorded)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """As the model's own. The result is overwritten by the next step."""
        count = len(input_ids)
        recorded = self._recorded[min(size for size in self._recorded if size >= count)]
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


class CudaGraphHook(RunnerHook):
    """Installed on a GPU without `--enforce-eager`."""

    graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def cache_allocated(self, num_blocks: int) -> None:
        """Record decode steps."""
        if self.runner.device.type == "cuda":
            started = time.monotonic()
            self.graphs = self._record(self.runner.kv_caches, self._sizes(), GraphCapture())
            if trace.on:
                took = round(time.monotonic() - started, 4)
                trace.emit("graphs.captured", kind="cuda", sizes=self._sizes(), seconds=took)

    @torch.inference_mode()
    def reserved_bytes(self) -> int:
        """What the recordings will take, before there is a cache: the largest two are made on two blocks and thrown away. The first one
        shows what all share, the second what each other one adds."""
        if self.runner.device.type != "cuda":
            return 0
        taken: list[int] = []
        record = GraphCapture()

        def measured(run: Run) -> Run:
            before = free_bytes()
            replay = record(run)
            taken.append(max(0, before - free_bytes()))
            return replay

        sizes = self._sizes()
        self._record(self.runner.new_kv_caches(2, self.runner.device), sizes[-2:], measured)
        return taken[0] + sum(taken[1:]) * (len(sizes) - 1)

    def _sizes(self) -> list[int]:
        return graph_sizes(self.config.scheduler_config.max_num_seqs)

    def _record(self, kv_caches: list[Tensor], sizes: list[int], capture: Capture) -> DecodeGraphs:
        max_blocks, device = self.runner.batch.block_table.shape[1], self.runner.device
        return DecodeGraphs(self.runner.model, kv_caches, max_blocks, self.config.max_model_len, sizes, device, capture)

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """Replay a decode step."""
        if self.graphs is None or not (inputs.replayable and self.graphs.fits(inputs.metadata)):
            return run(inputs)
        return self.graphs.forward(inputs.input_ids, inputs.positions, inputs.metadata)

    def shutdown(self) -> None:
        """Release the graphs."""
        self.graphs = None
