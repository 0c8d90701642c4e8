"""The end of pooling requests: no token follows their prompt (vllm/v1/core/sched/scheduler.py, `pooler_outputs`). No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.scheduler import Scheduler


def end_pooled(
    scheduler: Scheduler, output: SchedulerOutput, runner_output: ModelRunnerOutput
) -> list[EngineCoreOutput]:
    """End the requests whose vectors came with this step. Those whose prompt needs more steps simply go on."""
    outputs = []
    for request_id, vectors in runner_output.pooled.items():
        request = scheduler.requests[request_id]
        if trace.on:
            numbers = len(vectors[0]) // 4
            trace.emit("sched.pooled", req=request_id, step=output.step, vectors=len(vectors), dimensions=numbers)
        ended = EngineCoreOutput(request_id, [], finish_reason=FinishReason.STOP)
        ended.num_cached_tokens, ended.result = request.num_cached_tokens, {"pooled": vectors}
        outputs.append(ended)
        scheduler._finish(request, FinishReason.STOP, "pooled")
    return outputs
