"""A scheduler that decides a step while the one before it still runs (vllm/v1/core/sched/async_scheduler.py). No torch.

Which token a running step samples is not known yet, but that it samples one is: a decision does not look at tokens, only at how many
there are. So `schedule` counts one token more for each request that the step in flight completes, unless the length limits make that
its last one. When a step's tokens arrive, those of requests that ended meanwhile (a stop token, an abort) are dropped.

Blocks need no waiting time: a block that a request gives back while a step in flight still writes to it can reach its next
owner only in a later step, and the model runs the steps in order. What that step writes is behind the request's last token, in a block
that is not full and therefore in no prefix cache.
"""

from __future__ import annotations

from typing import Any

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput


class AsyncScheduler(Scheduler):
    """`schedule` may be called once more before the `update_from_output` of the step before it.

    Invariant: outside of `schedule`, `num_tokens` of every request counts known tokens only.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._in_flight: dict[int, dict[str, Request]] = {}  # step -> the requests that it computes

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, as if the step in flight had ended."""
        expecting = self._expecting()
        for request in expecting:
            request.num_tokens += 1
        output = super().schedule()
        for request in expecting:
            request.num_tokens -= 1
        self._in_flight[output.step] = {i: self.requests[i] for i in output.num_scheduled_tokens}
        return output

    def _expecting(self) -> list[Request]:
        """Who will have one more token after the step in flight, and can go on from there."""
        return [r for step in self._in_flight.values() for r in step.values() if self._is_alive(r) and self._goes_on(r)]

    def _is_alive(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request  # its id may have a new owner

    def _goes_on(self, request: Request) -> bool:
        if request.num_computed_tokens < request.num_tokens:  # a part of its prompt: no token yet
            return False
        most = request.sampling_params.max_tokens or self.max_model_len
        return request.num_output_tokens + 1 < most and request.num_tokens + 1 < self.max_model_len

    def can_look_ahead(self) -> bool:
        """Is there anything to decide while a step is in flight?"""
        return (
            any(request.num_computed_tokens < request.num_tokens for request in self.running)
            or (len(self.waiting) > 0 and len(self.running) < self.config.max_num_seqs)
            or bool(self._expecting())
        ) and all(hook.may_look_ahead() for hook in self.hooks)

    def update_from_output(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append the sampled tokens of the requests that have not ended since this step was decided."""
        for request_id, request in self._in_flight.pop(output.step).items():
            if not self._is_alive(request):
                runner_output.drop(request_id)
        newest, self.step = self.step, output.step  # events name the step whose token ended a request
        outputs = super().update_from_output(output, runner_output)
        self.step = newest
        return outputs
