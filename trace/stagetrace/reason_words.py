"""The words of `why`: a sentence for each kind of decision, and where its rule stands, here and in vLLM."""

from __future__ import annotations

from typing import Any

from stagetrace.engine_state import EngineState, RequestState

_SCHEDULER = "stage03_engine/core/scheduler.py Scheduler."
_VLLM = "vllm/v1/core/sched/scheduler.py Scheduler."
_WAITING = (_SCHEDULER + "_schedule_waiting", _VLLM + "schedule")
_STOP = ("stage03_engine/core/request.py check_stop", "vllm/v1/core/sched/utils.py check_stop")

CODE: dict[str, tuple[str, str]] = {
    "budget": _WAITING,
    "max_num_seqs": _WAITING,
    "blocks": ("stage03_engine/core/kv_cache_manager.py KVCacheManager.allocate_slots", "vllm/v1/core/kv_cache_manager.py KVCacheManager.allocate_slots"),
    "no_chunking": _WAITING,
    "preempted": (_SCHEDULER + "schedule", _VLLM + "schedule"),
    "order": _WAITING,
    "grammar": (_SCHEDULER + "_grammar_is_ready", _VLLM + "schedule (WAITING_FOR_FSM)"),
    "budget of running": (_SCHEDULER + "_schedule_running", _VLLM + "schedule"),
    "admit": (_SCHEDULER + "_admit", _VLLM + "schedule"),
    "resume": (_SCHEDULER + "_admit", _VLLM + "schedule"),
    "chunk": (_SCHEDULER + "_limited", _VLLM + "schedule"),
    "drafts": ("stage03_engine/core/spec_decode/draft_scheduler.py DraftScheduler.schedule", _VLLM + "schedule"),
    "verify": ("stage03_engine/core/spec_decode/draft_scheduler.py DraftScheduler.settle", _VLLM + "update_from_output"),
    "preempt": (_SCHEDULER + "_allocate_or_preempt", _VLLM + "schedule"),
    "prefix": ("stage03_engine/core/kv_cache_manager.py KVCacheManager.get_computed_blocks", "vllm/v1/core/kv_cache_manager.py KVCacheManager.get_computed_blocks"),
    "end eos": _STOP,
    "end stop_token": _STOP,
    "end length": _STOP,
    "end grammar": (_SCHEDULER + "update_from_output", _VLLM + "update_from_output"),
    "end outside": (_SCHEDULER + "finish_requests", _VLLM + "finish_requests"),
}  # fmt: skip
"""Rule -> (file and function here, file and function in vLLM)."""


def _block_size(settings: dict[str, Any]) -> int:
    size: int = settings.get("cache_config", {}).get("block_size", 16)
    return size


def _threshold(settings: dict[str, Any]) -> int:
    threshold: int = settings.get("scheduler_config", {}).get("long_prefill_token_threshold", 0)
    return threshold


def held_back(args: dict[str, Any], first: RequestState | None, settings: dict[str, Any], sent_away: list[str]) -> str:
    """Why the first waiting request was not admitted: the rule of a `sched.held_back`."""
    left, free = args["budget_left"], args["free_blocks"]
    missing = first.total - first.computed if first is not None else 0
    match args["rule"]:
        case "budget":
            return f"no token of the budget ({settings['max_num_batched_tokens']}) was left."
        case "max_num_seqs":
            return f"{args['num_running']} requests run, and max_num_seqs is {settings['max_num_seqs']}."
        case "no_chunking":
            return f"{missing} tokens must be computed at once (chunked prefill is off), and {left} of the budget were left."
        case "blocks":
            size = _block_size(settings)
            chunk = min(missing, left, _threshold(settings) or missing)
            computed = first.computed if first is not None else 0
            needed = -(-(computed + chunk) // size)
            return (
                f"its next {chunk} tokens take up to {needed} blocks of {size} tokens (fewer where the prefix cache has them), "
                f"and {free} were free."
            )
        case "preempted":
            return f"{', '.join(sent_away)} had to go in this step, and whoever was sent away must not be overtaken by a newcomer."
    return args["rule"] + "."


def scheduled(args: dict[str, Any], settings: dict[str, Any], request: RequestState) -> str:
    """Why so many tokens, and these blocks: a `sched.scheduled`."""
    given, missing, computed, left = args["num_tokens"], args["missing"], args["num_computed"], args["budget_left"]
    budget, threshold, size = settings["max_num_batched_tokens"], _threshold(settings), _block_size(settings)
    of_budget = f"{left} of the budget of {budget} were left"
    if given == missing == 1:
        text = f"It got 1 token: all that it was missing, the one that was sampled last ({of_budget})."
    elif given == missing:
        text = f"It got {given} tokens, all that it was missing ({of_budget})."
    elif given == left:
        text = f"It got {given} of {missing} missing tokens: {of_budget}."
    elif given == threshold:
        text = f"It got {given} of {missing} missing tokens: long_prefill_token_threshold is {threshold}, and others are there ({of_budget})."
    else:
        text = f"It got {given} of {missing} missing tokens ({of_budget})."
    text += f" With them {computed + given} of {request.total if request.total else computed + missing} tokens are computed."
    if args["new_blocks"]:
        needed = -(-(computed + given) // size)
        text += f" They take {needed} blocks of {size} tokens, of which it held {needed - len(args['new_blocks'])}: new ones {args['new_blocks']}."
    return text


def preempted(args: dict[str, Any], state: EngineState, request_id: str, running: list[str]) -> str:
    """Who needed blocks, and why this one was the victim: a `sched.preempt`."""
    policy = state.settings.get("scheduler_config", {}).get("scheduling_policy", "fcfs")
    request = state.requests[request_id]
    others = len([i for i in running if i in state.requests and state.requests[i].status == "running"])
    if policy == "priority":
        rule = f"under the priority policy the largest number goes first, then the latest arrival: its priority is {request.params.get('priority', 0)}"
    else:
        rule = "under fcfs the running request that arrived last goes first"
    who = "it needed blocks itself" if args["needed_by"] == request_id else f"{args['needed_by']} needed blocks"
    lost = (
        "its keys and values went to CPU memory"
        if args["swapped"]
        else f"its {args['num_computed']} computed tokens are lost and will be computed again"
    )
    return (
        f"It was preempted: {who}, and {args['free_before']} were free. Of {others} running requests it had to go: {rule} "
        f"(it was number {request.arrival} to arrive). It gave back {args['freed_blocks']} blocks; {lost}."
    )
