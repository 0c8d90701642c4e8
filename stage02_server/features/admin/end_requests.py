"""End requests on behalf of an administrator."""

from __future__ import annotations

from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stagetrace import trace


def running_request_ids(engine: AsyncLLM) -> list[str]:
    """Requests that still run or wait, by their callers' ids: with n above 1 one id for all answers."""
    return list(engine.output_processor.external_req_ids)


async def end_requests(engine: AsyncLLM, request_ids: list[str], reason: str) -> None:
    """Their callers receive what there is so far, with finish reason "abort". Unknown ids are ignored. Raises EngineDeadError."""
    engine.check_health()
    running = set(running_request_ids(engine))
    for request_id in request_ids:
        if request_id not in running:
            continue
        if trace.on:
            trace.emit("request.aborted", req=request_id, reason=reason)
        ended = _end_request(engine, request_id)
        for stat_logger in engine.stat_loggers:
            stat_logger.request_aborted(engine.engine_core.engine_of(ended[0]))
        await engine.engine_core.abort_requests_async(ended)


def _end_request(engine: AsyncLLM, request_id: str) -> list[str]:
    """End a caller's request with what there is so far; returns its engine core requests."""
    processor = engine.output_processor
    running = list(processor.external_req_ids[request_id])
    ends = [EngineCoreOutput(part, [], finish_reason=FinishReason.ABORT) for part in running]
    for end in ends:
        end.num_cached_tokens = processor.request_states[end.request_id].num_cached_tokens
    processor.process_outputs(ends, IterationStats())
    return running
