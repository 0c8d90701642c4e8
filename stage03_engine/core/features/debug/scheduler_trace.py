"""What the scheduler says of its decisions in the trace, where it takes more than a line: who was admitted, and why the others
were not. Only called while the trace is on. vLLM has no counterpart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.messages import FinishReason
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.scheduler import Scheduler


def trace_admitted(scheduler: Scheduler, request: Request, hits: list[int], new_blocks: list[int]) -> None:
    """A request leaves the waiting ones; `new_blocks` begin with the `hits` of the prefix cache."""
    request_id, step = request.request_id, scheduler.step
    if trace.on and hits:
        num_tokens = len(hits) * scheduler.kv_cache_manager.block_size
        trace.emit("sched.prefix_hit", req=request_id, step=step, blocks=hits, num_tokens=num_tokens)
    if trace.on and request.status == RequestStatus.PREEMPTED:
        trace.emit("sched.resume", req=request_id, step=step, new_blocks=new_blocks, num_tokens=request.num_tokens)
    elif trace.on:
        prompt = request.num_prompt_tokens
        trace.emit("sched.admit", req=request_id, step=step, new_blocks=new_blocks, num_prompt_tokens=prompt)


def trace_held_back(scheduler: Scheduler, rule: str, budget: int, index: int = 0) -> None:
    """Why nobody else was admitted: `rule` stopped the waiting request at `index`, and it everybody behind it; those before
    it wait for their grammars. An empty rule: nobody else could be asked."""
    request_ids = [request.request_id for request in scheduler.waiting]
    if trace.on:
        trace.emit(
            "sched.held_back", step=scheduler.step, rule=rule, first=request_ids[index] if rule else None,
            behind=request_ids[index + 1 :], grammar=request_ids[:index], budget_left=budget,
            free_blocks=scheduler.kv_cache_manager.block_pool.num_free, num_running=len(scheduler.running),
        )  # fmt: skip


def ended_by(reason: FinishReason, stop_reason: int | str | None) -> str:
    """The rule that ended a request within a step."""
    if reason == FinishReason.LENGTH:
        return "length"
    return "eos" if stop_reason is None else "stop_token"
