"""Which steps are replayed (vllm/v1/cudagraph_dispatcher.py, CudagraphDispatcher), and when they are recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.cuda_graphs.cuda_graphs import (
    CudaGraphs,
    DecodeGraphs,
    Graphs,
    Run,
    free_bytes,
    whole,
)
from stage03_engine.core.features.cuda_graphs.modes import FULL, NONE, PIECEWISE
from stage03_engine.core.features.cuda_graphs.piecewise import PiecewiseGraphs
from stage03_engine.core.features.cuda_graphs.plan import Plan
from stage03_engine.core.features.cuda_graphs.sampling import FixedSettings, GraphSampler
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import SchedulerOutput
from stage04_kernels.attention import AttentionMetadata, load
from stage04_kernels.sampler import FUSED, SamplingMetadata
from stagetrace import trace

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What happens with a step: the recording that it takes, the size to which it is padded (0: it is not), and the reason."""

    mode: str
    size: int
    why: str


class CudaGraphHook(RunnerHook):
    """Installed on a GPU without `--enforce-eager`, and with `cudagraph_simulate`."""

    full: DecodeGraphs | None = None
    pieces: PiecewiseGraphs | None = None

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.plan = Plan.of(config)
        self.sampler: GraphSampler | None = None
        self._settings: FixedSettings | None = None
        self._after: dict[int, tuple[Tensor, Tensor]] = {}  # logits and tokens of each size
        self._step = 0

    def new_graphs(self) -> Graphs | None:
        """What records here; None: nothing does."""
        if self.runner.device.type == "cuda":
            return CudaGraphs()
        if self.plan.simulate:
            from stage03_engine.core.features.cuda_graphs.simulated import SimulatedGraphs

            return SimulatedGraphs()
        return None

    @torch.inference_mode()
    def cache_allocated(self, num_blocks: int) -> None:
        """Record steps: pieces first, as they are the largest."""
        graphs, runner, plan = self.new_graphs(), self.runner, self.plan
        if graphs is None or not plan.num_graphs:
            return
        logger.info("CUDA graphs: %s", ", ".join(plan.row(self.config)[1:]))
        began = time.monotonic()
        if plan.pieces:
            started = time.monotonic()
            self.pieces = PiecewiseGraphs(runner.model, runner.kv_caches, plan.pieces, runner.device, graphs)
            self._report("piecewise", plan.pieces, len(plan.pieces) * self.pieces.num_pieces, started)
        if plan.full:
            started = time.monotonic()
            self._with_sampler()
            self.full = self._record(runner.kv_caches, plan.full, partial(whole, graphs))
            if self.sampler is not None:  # those who ask for logits and tokens get the graph's
                runner.model.compute_logits = self.sampler.compute_logits  # type: ignore[method-assign]
                runner.sampler = self.sampler.sample
                runner.sampling_metadata = self._sampling_metadata(runner.sampling_metadata)  # type: ignore[assignment, method-assign]
            self._report("cuda", plan.full, len(plan.full), started)
        plan.remember(self.config, time.monotonic() - began)

    def _with_sampler(self) -> None:
        """Room for what the sampler reads, if it is to be in the graphs."""
        if self.plan.sampler and self.sampler is None:
            runner, kernels = self.runner, load(FUSED[self.config.device_config.attention_backend])
            self._settings = FixedSettings(max(self.plan.full), runner.device)
            self.sampler = GraphSampler(runner.model.compute_logits, runner.sampler, kernels)

    def _report(self, kind: str, sizes: list[int], count: int, started: float) -> None:
        took = round(time.monotonic() - started, 4)
        logger.info("Recorded %d CUDA graphs (%s, sizes up to %d) in %.1f s", count, kind, max(sizes), took)
        if trace.on:
            trace.emit("graphs.captured", kind=kind, sizes=sizes, seconds=took)

    @torch.inference_mode()
    def reserved_bytes(self) -> int:
        """What the recordings will take, before there is a cache: of each kind the largest two are made on two blocks and thrown away. The first one
        shows what all share, the second what each other one adds."""
        if self.runner.device.type != "cuda":
            return 0
        kv_caches = self.runner.new_kv_caches(2, self.runner.device)
        self._with_sampler()
        return self._taken(self.plan.full, lambda sizes: self._record(kv_caches, sizes, partial(whole, CudaGraphs()))) + self._taken(
            self.plan.pieces, lambda sizes: PiecewiseGraphs(self.runner.model, kv_caches, sizes, self.runner.device, CudaGraphs())
        )  # fmt: skip

    def _taken(self, sizes: list[int], record: Callable[[list[int]], Any]) -> int:
        """For all sizes, from what one and two of them take."""
        if not sizes:
            return 0
        taken = []
        for some in (sizes[-1:], sizes[-2:]):
            before = free_bytes()
            held = record(some)
            taken.append(max(0, before - free_bytes()))
            del held
            self._after.clear()
        return taken[0] + max(0, taken[1] - taken[0]) * (len(sizes) - 1)

    def _record(self, kv_caches: list[Tensor], sizes: list[int], capture: Callable[[Run], Run]) -> DecodeGraphs:
        max_blocks, device = self.runner.batch.block_table.shape[1], self.runner.device
        return DecodeGraphs(self._decode, kv_caches, max_blocks, self.config.max_model_len, sizes, device, capture)

    def _decode(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """What a graph of a decode step holds."""
        hidden: Tensor = self.runner.model(input_ids, positions, kv_caches, metadata)
        if self.sampler is not None and self._settings is not None:
            self._after[len(input_ids)] = self.sampler.computed(hidden, self._settings.of(len(input_ids)))
        return hidden

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Note which step it is."""
        self._step = scheduler_output.step
        return scheduler_output

    def dispatch(self, inputs: StepInputs) -> Choice:
        """Which recording a step takes."""
        count, metadata = len(inputs.input_ids), inputs.metadata
        if not inputs.replayable:
            return Choice(NONE, 0, "a feature changes what the model computes in this step")
        if self.full is not None and self.full.fits(metadata):
            return Choice(FULL, self.full.size_of(count), "one token for each request")
        mixed = metadata.max_query_len > 1
        why = "several tokens for a request" if mixed else f"{count} requests, more than were recorded whole"
        if self.pieces is None:
            return Choice(NONE, 0, why)
        if count > self.pieces.largest:
            return Choice(NONE, 0, f"{count} tokens, more than the largest size, {self.pieces.largest}")
        return Choice(
            PIECEWISE,
            self.pieces.size_of(count),
            why if mixed or self.full is not None else "one token for each request",
        )

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """Replay a step, whole or in pieces, or let it run."""
        if self.sampler is not None:
            self.sampler.forget()
        if self.full is None and self.pieces is None:
            return run(inputs)
        choice = self.dispatch(inputs)
        if trace.on:
            trace.emit(
                "graphs.dispatched", step=self._step, mode=choice.mode, num_tokens=len(inputs.input_ids), size=choice.size, why=choice.why
            )  # fmt: skip
        arguments = inputs.input_ids, inputs.positions, inputs.metadata
        if choice.mode == PIECEWISE and self.pieces is not None:
            return self.pieces.forward(*arguments)
        if choice.mode == FULL and self.full is not None:
            return self._whole(self.full, inputs, choice.size)
        return run(inputs)

    def _whole(self, full: DecodeGraphs, inputs: StepInputs, size: int) -> Tensor:
        count, metadata = len(inputs.input_ids), None
        if self.sampler is not None and self._settings is not None and len(inputs.sampled) == count:
            metadata = self.runner.sampling_metadata(inputs)
            self._settings.fill(metadata)
        hidden = full.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        if self.sampler is not None:
            logits, tokens = self._after[size]
            self.sampler.remember(hidden, logits[:count], tokens[:count], metadata)
        return hidden

    def _sampling_metadata(
        self, make: Callable[[StepInputs], SamplingMetadata]
    ) -> Callable[[StepInputs], SamplingMetadata]:
        def settings(inputs: StepInputs) -> SamplingMetadata:
            assert self.sampler is not None
            return self.sampler.settings(lambda: make(inputs))

        return settings

    def shutdown(self) -> None:
        """Release the graphs."""
        self.full = self.pieces = None
        self._after = {}
