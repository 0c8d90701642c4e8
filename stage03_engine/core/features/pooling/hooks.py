"""Pooling requests in the scheduler and in the model runner: they end with their prompt, in vectors
(vllm/v1/core/sched/scheduler.py, `pooler_outputs`; GPUModelRunner._pool). No torch: the pooler is made by the runner's hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook, SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput, FinishReason, payload
from stage03_engine.params.pooling_params import PoolingParams
from stagetrace import trace

if TYPE_CHECKING:
    from torch import Tensor

    from stage03_engine.core.input_batch import StepInputs
    from stage03_engine.core.model_runner import ModelRunner


class Pooled(msgspec.Struct, array_like=True):
    """The vectors of a request that has caught up: float32, as bytes."""

    vectors: list[bytes]


POOLED = Extra("pooling", Pooled)


class PoolingSchedulerHook(SchedulerHook):
    """Installed with `--runner pooling`."""

    def added(self, request: Request) -> None:
        """The prefix cache has keys and values, but no hidden states."""
        if request.task is not None:
            request.skip_reading_prefix_cache = payload(request.task, PoolingParams).needs_all_tokens

    def traced_params(self, request: Request) -> dict[str, Any]:
        """The settings of the pooling request."""
        if request.task is None:
            return {}
        return {"pooling": msgspec.structs.asdict(payload(request.task, PoolingParams))}

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """End the requests whose vectors came with this step. Those whose prompt needs more steps simply go on."""
        outputs = []
        for request_id, found in runner_output.results.items():
            if (pooled := POOLED.of(found)) is None:
                continue
            request, vectors = self.scheduler.requests[request_id], pooled.vectors
            if trace.on:
                numbers = len(vectors[0]) // 4
                trace.emit("sched.pooled", req=request_id, step=output.step, vectors=len(vectors), dimensions=numbers)
            ended = EngineCoreOutput(request_id, [], finish_reason=FinishReason.STOP, result={"pooled": vectors})
            ended.num_cached_tokens, ended.queued_seconds = request.num_cached_tokens, request.queued_seconds
            ended.num_preemptions = request.num_preemptions
            outputs.append(ended)
            self.scheduler._finish(request, FinishReason.STOP, by="pooled")
        return outputs


class PoolingRunnerHook(RunnerHook):
    """Installed with `--runner pooling`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        from stage03_engine.core.features.pooling.pooler import Pooler

        super().__init__(runner, config)
        self._pooler = Pooler(config)
        self._pooled: dict[str, list[bytes]] = {}

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """The pooler keeps what steps computed of a prompt."""
        self._pooler.update(scheduler_output)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """Nothing is sampled."""
        head = self.runner.model.compute_logits
        self._pooled = self._pooler.pool(self.runner.batch, scheduler_output, hidden, head)
        return True

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """The vectors of the prompts that this step completed."""
        for request_id, vectors in self._pooled.items():
            output.add(request_id, POOLED, Pooled(vectors))
        self._pooled = {}
