"""The inner loop with a batch queue, which keeps every stage of a pipeline busy (vllm/v1/engine/core.py, step_with_batch_queue).

    engine core  | decide 1, decide 2 |   wait   | update 1, decide 3 |   wait   | update 2, decide 4 | ...
    stage 0      |          run 1         run 2                    run 3                    run 4
    stage 1      |                        run 1         run 2                    run 3

The stages that do not sample learn the sampled tokens from the decisions (`NewTokens`). So a worker waits for hidden
states, and for nothing else.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Protocol, cast

from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.distributed.pipeline_scheduler import PipelineScheduler
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs


class StepsInFlight(Protocol):
    """What an executor of several stages has besides the methods of `Executor`: steps that need not wait for each other. Outputs come in order."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None: ...
    def finish_step(self) -> ModelRunnerOutput: ...


class PipelineEngineCore(EngineCore):
    """An EngineCore that keeps as many steps in flight as there are stages. Its `step` returns the outputs of the oldest one."""

    scheduler: PipelineScheduler

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._max_in_flight = config.parallel_config.pipeline_parallel_size
        self._steps = cast(StepsInFlight, self.executor)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._arrived: deque[ModelRunnerOutput] = deque()  # outputs of the oldest of them

    @property
    def has_unfinished_requests(self) -> bool:
        """Has `step` anything to do? A step in flight has results, even if all of them will be dropped."""
        return bool(self._in_flight) or super().has_unfinished_requests

    def step(self) -> EngineCoreOutputs:
        """Decide steps until every stage has one, then wait for the oldest."""
        ended, can_run = self._poll_hooks()
        while can_run and self._may_start():
            output = self._begin()
            self._steps.begin_step(output)
            self._in_flight.append(output)
        if not self._in_flight:
            return self._observed(EngineCoreOutputs(ended, self.scheduler.make_stats()))
        return self._finish(ended)

    def _may_start(self) -> bool:
        if not self._in_flight:
            return self.scheduler.has_unfinished_requests
        return len(self._in_flight) < self._max_in_flight and self.scheduler.can_schedule()

    def _finish(self, ended: list[EngineCoreOutput]) -> EngineCoreOutputs:
        """The end of the oldest step in flight."""
        output = self._in_flight.popleft()
        return self._end(output, self._arrived.popleft() if self._arrived else self._steps.finish_step(), ended)

    def call(self, method: str, *args: Any) -> Any:
        """Call a feature's function by name, once the outputs of all steps in flight are there: what it has the workers do comes behind these, and
        the answer is its own."""
        while len(self._arrived) < len(self._in_flight):
            self._arrived.append(self._steps.finish_step())
        return super().call(method, *args)

    def shutdown(self) -> None:
        """Finish the steps in flight, so that a recording has no half steps, and release everything."""
        try:
            with suppress(Exception):  # an engine that fails has said why
                while self._in_flight:
                    self._finish([])
        finally:
            super().shutdown()
