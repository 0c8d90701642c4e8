"""The inner loop with overlapping steps (vllm/v1/engine/core.py, step_with_batch_queue).

    main thread     | decide 1 | decide 2 |   wait   | update 1, decide 3 |  wait  | update 2, decide 4 | ...
    model thread               |    run 1            |    run 2                    |    run 3           | ...

The thread runs the decisions in order, so the persistent batch holds the tokens of step n when step n+1 gathers its inputs.
torch and native code release the interpreter lock while they compute, and Python decides meanwhile.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.async_scheduling.async_scheduler import AsyncScheduler
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutputs

MAX_IN_FLIGHT = 2  # one that runs, and one that waits for it


class AsyncEngineCore(EngineCore):
    """An EngineCore whose `step` returns the outputs of the oldest step while the next one runs already."""

    scheduler: AsyncScheduler

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        threads = torch.get_num_threads()  # a setting of each thread
        self._model = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()

    @property
    def has_unfinished_requests(self) -> bool:
        """Does `step` have anything to do? A step in flight has results, if only some to be dropped."""
        return bool(self._in_flight) or super().has_unfinished_requests

    def step(self) -> EngineCoreOutputs:
        """Decide up to two steps ahead of the last results, then wait for the oldest step in flight."""
        ended, can_run = self._poll_hooks()
        while can_run and self._may_start():
            output = self._begin()
            self._in_flight.append((output, self._model.submit(self.executor.execute_model, output)))
        if not self._in_flight:
            return self._observed(EngineCoreOutputs(ended, self.scheduler.make_stats()))
        output, future = self._in_flight.popleft()
        return self._end(output, future.result(), ended)

    def _may_start(self) -> bool:
        if not self._in_flight:
            return self.scheduler.has_unfinished_requests
        return len(self._in_flight) < MAX_IN_FLIGHT and self.scheduler.can_look_ahead()

    def call(self, method: str, *args: Any) -> Any:
        """Call a feature's function by name, after the steps in flight and where the model runs: torch profiles a single thread."""
        return self._model.submit(super().call, method, *args).result()

    def shutdown(self) -> None:
        """End the steps in flight, so that a recording has no half steps, and release everything."""
        self._model.shutdown()
        try:
            while self._in_flight:
                output, future = self._in_flight.popleft()
                if future.exception() is None:  # else the failing engine has already said why
                    self._end(output, future.result(), [])
        finally:
            super().shutdown()
