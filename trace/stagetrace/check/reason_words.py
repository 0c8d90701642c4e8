"""The words of `why`: a sentence for each kind of decision, and where its rule is, here and in vLLM."""

from __future__ import annotations

import json
from typing import Any

from stagetrace.ids import root_of
from stagetrace.read.engine_state import EngineState, RequestState
from stagetrace.read.lanes import WorkerTime, place_of_worker
from stagetrace.read.terminal import milliseconds

MOST_LIKELY = 5  # candidates of a token that are told
_SCHEDULER = "stage03_engine/core/scheduler.py Scheduler."
_VLLM = "vllm/v1/core/sched/scheduler.py Scheduler."
_MANAGER = "stage03_engine/core/kv_cache_manager.py KVCacheManager."
_VLLM_MANAGER = "vllm/v1/core/kv_cache_manager.py KVCacheManager."
_DRAFTS = "stage03_engine/core/features/spec_decode/draft_scheduler.py DraftHook."
_GRAMMARS = "stage03_engine/core/features/structured_output/scheduler_hook.py GrammarSchedulerHook."
_CONNECTOR = "stage03_engine/core/features/kv_transfer/connector.py KVConnectorHook."
_AHEAD = "stage03_engine/core/features/async_scheduling/async_scheduler.py AsyncScheduler."
_FAIR = "stage03_engine/core/features/fair_queue/fair_queue.py FairQueue."
_WAITING = (_SCHEDULER + "_schedule_waiting", _VLLM + "schedule")
_STOP = ("stage03_engine/core/request.py check_stop", "vllm/v1/core/sched/utils.py check_stop")

_ENCODER = "stage03_engine/core/features/multimodal/scheduler_hook.py EncoderSchedulerHook."
_CLIENT = "stage03_engine/frontend/features/data_parallel/client.py DPLBAsyncMPClient."
_BALANCER = "stage03_engine/frontend/features/data_parallel/balancing.py Balancer."

CODE: dict[str, tuple[str, str]] = {
    "budget": _WAITING,
    "max_num_seqs": _WAITING,
    "blocks": (_MANAGER + "allocate_slots", _VLLM_MANAGER + "allocate_slots"),
    "no_chunking": _WAITING,
    "hooks": (_ENCODER + "limited", _VLLM + "_try_schedule_encoder_inputs"),
    "encoder": (_ENCODER + "limited", _VLLM + "_try_schedule_encoder_inputs"),
    "preempted": (_SCHEDULER + "schedule", _VLLM + "schedule"),
    "order": _WAITING,
    "turn": (_FAIR + "in_turn", "nowhere"),
    "grammar": (_GRAMMARS + "holds", _VLLM + "schedule (WAITING_FOR_FSM)"),
    "connector": (_CONNECTOR + "holds", _VLLM + "schedule (WAITING_FOR_REMOTE_KVS)"),
    "grammar late": (_GRAMMARS + "executed", "nowhere"),
    "last token": (_SCHEDULER + "_schedule_running", _VLLM + "schedule"),
    "budget of running": (_SCHEDULER + "_schedule_running", _VLLM + "schedule"),
    "admit": (_SCHEDULER + "_admit", _VLLM + "schedule"),
    "resume": (_SCHEDULER + "_admit", _VLLM + "schedule"),
    "chunk": (_SCHEDULER + "_limited", _VLLM + "schedule"),
    "drafts": (_DRAFTS + "scheduled", _VLLM + "schedule"),
    "verify": (_DRAFTS + "sampled", _VLLM + "update_from_output"),
    "preempt": (_SCHEDULER + "_allocate_or_preempt", _VLLM + "schedule"),
    "prefix": (_MANAGER + "get_computed_blocks", _VLLM_MANAGER + "get_computed_blocks"),
    "end eos": _STOP,
    "end stop_token": _STOP,
    "end length": _STOP,
    "end grammar": (_GRAMMARS + "sampled", _VLLM + "update_from_output"),
    "dropped": (_AHEAD + "update_from_output", _VLLM + "update_from_output"),
    "routed": (_BALANCER + "choose", "vllm/v1/engine/core_client.py DPLBAsyncMPClient.get_core_engine_for_request"),
    "engine lost": (_CLIENT + "_died", "nowhere"),
    "end outside": (_SCHEDULER + "finish_requests", _VLLM + "finish_requests"),
}
"""Rule -> (file and function here, file and function in vLLM)."""


def _block_size(settings: dict[str, Any]) -> int:
    size: int = settings.get("cache_config", {}).get("block_size", 16)
    return size


def _threshold(settings: dict[str, Any]) -> int:
    threshold: int = settings.get("scheduler_config", {}).get("long_prefill_token_threshold", 0)
    return threshold


def count(number: int, word: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def held_back(args: dict[str, Any], first: RequestState | None, settings: dict[str, Any], sent_away: list[str]) -> str:
    """Why the first waiting request was not admitted: the rule of a `sched.held_back`."""
    left, free, seats = args["budget_left"], args["free_blocks"], settings["max_num_seqs"]
    missing = first.total - first.computed if first is not None else 0
    match args["rule"]:
        case "budget":
            return f"no token of the budget ({settings['max_num_batched_tokens']}) was left."
        case "max_num_seqs":
            return f"{count(args['num_running'], 'request')} run already, and max_num_seqs is {seats}."
        case "no_chunking":
            whole = f"{count(missing, 'token')} must be computed at once (chunked prefill is off)"
            return f"{whole}, and {left} of the budget were left."
        case "blocks":
            size = _block_size(settings)
            chunk = min(missing, left, _threshold(settings) or missing)
            computed = first.computed if first is not None else 0
            needed = -(-(computed + chunk) // size)
            if needed <= free:  # only a hit makes it more
                return f"the tokens that the prefix cache has of it lie in free blocks, and with the next ones it would take more than the {free} free blocks."
            cached = "fewer where the prefix cache has them"
            return f"its next {count(chunk, 'token')} take up to {count(needed, 'block')} of {size} tokens ({cached}); free: {free}."
        case "hooks":
            return "it would begin with an image, for which the encoder has no room in this step."
        case "preempted":
            victims = ", ".join(sent_away)
            return f"{victims} had to go in this step, and no new request may overtake a preempted one."
    return f"the rule {args['rule']!r}."


def token_chances(number: int, chosen: list[Any], *likely: list[Any]) -> str:
    """What a token of an answer is and could have been: [text, probability] of the chosen one and of the likeliest ones."""

    def words(one: list[Any]) -> str:
        text, share = one
        shown = json.dumps(text, ensure_ascii=False) if text else "(part of a character)"
        return f"{shown} {100 * share:.{2 if share < 0.0995 else 1}f} %{' (chosen)' if one == chosen else ''}"

    most = list(likely[:MOST_LIKELY])
    told = most if chosen in most else [*most, chosen]
    return f"Token {number} of its answer could have been {', '.join(map(words, told))}."


def turn(args: dict[str, Any]) -> str:
    """Whose turn it was: a `sched.turn`."""
    own, others = args["own"], count(args["others"], "other HTTP request")
    wait = "waits" if args["others"] == 1 else "wait"
    after = f"{own} more of its own wait until these had their turns" if own else "none of its own waits"
    return f"It was the turn of its HTTP request, {args['group']}: {others} {wait}, and {after}."


def scheduled(args: dict[str, Any], settings: dict[str, Any], num_hits: int) -> str:
    """Why so many tokens, and these blocks: a `sched.scheduled`. The first `num_hits` of its blocks were found in the
    prefix cache."""
    given, missing, computed, left = args["num_tokens"], args["missing"], args["num_computed"], args["budget_left"]
    threshold, size = _threshold(settings), _block_size(settings)
    of_budget = f"{left} of the budget of {settings['max_num_batched_tokens']} were left"
    if given == missing == 1:
        text = f"It got 1 token: all that it was missing, the newest one ({of_budget})."
    elif given == missing:
        text = f"It got {count(given, 'token')}: all that it was missing ({of_budget})."
    elif given == left:
        text = f"It got {given} of {missing} missing tokens: {of_budget}."
    elif given == threshold:
        limit = f"long_prefill_token_threshold is {threshold}, and others are there"
        text = f"It got {given} of {missing} missing tokens: {limit} ({of_budget})."
    else:
        text = f"It got {given} of {missing} missing tokens ({of_budget})."
    text += f" With them {computed + given} of {computed + missing} tokens are computed."
    new = args["new_blocks"][num_hits:]
    if new:
        needed = -(-(computed + given) // size)
        had = f"it had {needed - len(new)} of them" + (", found in the prefix cache" if num_hits else "")
        text += f" They take {count(needed, 'block')} of {size} tokens: {had}, and took {new} from the free ones."
    return text


def preempted(args: dict[str, Any], state: EngineState, request_id: str) -> str:
    """Who needed blocks, and why this one was the victim: a `sched.preempt`."""
    policy = state.settings.get("scheduler_config", {}).get("scheduling_policy", "fcfs")
    request = state.requests[request_id]
    running = sum(other.status == "running" for other in state.requests.values())
    order = f"it was number {request.arrival} to arrive"
    if policy == "priority":
        rule = "under the priority policy the one with the largest number goes first, then the one that arrived last"
        order = f"its priority is {request.params.get('priority', 0)}, and {order}"
    elif policy == "fair":
        group = root_of(request_id)
        own = sum(other.status == "running" and root_of(i) == group for i, other in state.requests.items())
        rule = "under the fair policy the HTTP request with the most of them gives one up, the one that arrived last"
        order = f"{group} had {own}; {order}"
    else:
        rule = "under fcfs the one that arrived last goes first"
    who = "it needed another block itself" if args["needed_by"] == request_id else f"{args['needed_by']} needed blocks"
    lost = f"its {count(args['num_computed'], 'computed token')} will be computed again"
    lost = "its keys and values went to CPU memory" if args["swapped"] else lost
    return (
        f"It was preempted: {who}, and {args['free_before']} were free. Of {count(running, 'running request')} it had to "
        f"go: {rule} ({order}). It gave {count(args['freed_blocks'], 'block')} back; {lost}."
    )


def ended(args: dict[str, Any], request: RequestState, settings: dict[str, Any]) -> str:
    """Why it is over: a `sched.finished`."""
    limit = request.params.get("max_tokens")
    full = f"it has its max_tokens = {limit}"
    if limit is None or request.total - request.prompt < limit:
        full = f"the context of {settings['max_model_len']} tokens is full"
    why = {
        "eos": "the newest token is the end-of-text token",
        "stop_token": "the newest token is one of its stop_token_ids",
        "length": full,
        "grammar": "its grammar allows nothing more, or failed",
        "outside": "between two steps the engine was told to (the client left, or a stop string came), or its grammar was refused",
    }.get(args["by"], args["by"])
    return f"It ended ({args['reason']}): {why}. It gave {count(args['freed_blocks'], 'block')} back."


def routed(args: dict[str, Any]) -> str:
    """Which engine got it: a `dp.routed`."""
    had = f"which has {count(args['waiting'], 'request')} waiting and {args['running']} running with it"
    cached = (
        f" and should have cached {count(args['cached_blocks'], 'block')} of its prompt"
        if args["cached_blocks"]
        else ""
    )
    again = " It begins again there: what it had computed died with its engine." if args["again"] else ""
    return f"It was sent to engine {args['engine']}, {had}{cached}.{again}"


def engine_lost(args: dict[str, Any]) -> str:
    """What became of the requests of an engine that died: a `dp.engine_lost`."""
    return (
        f"Engine {args['engine']}, which had it, died: {args['again']} of its requests run again on another one, "
        f"{args['failed']} end with an error; {count(args['num_ready'], 'engine')} "
        f"{'is' if args['num_ready'] == 1 else 'are'} still ready."
    )


def worker_time(time: WorkerTime) -> str:
    """What a worker did in a step."""
    kinds = [
        f"{one.count} {kind} ({milliseconds(one.ns)} ms, {one.bytes} bytes)" for kind, one in time.exchanges.items()
    ]
    own = f"{time.lane} took {milliseconds(time.forward_ns)} ms for its forward pass"
    return (
        f"{own}, and was {milliseconds(time.waited_ns)} ms in collectives: {', '.join(kinds)}." if kinds else f"{own}."
    )


def waited_for(times: list[WorkerTime]) -> list[str]:
    """Who waited for whom: within a stage for the one that was in collectives the shortest, and for the stage before."""
    lines = []
    stages: dict[int, list[WorkerTime]] = {}
    for time in times:
        stage, _ = place_of_worker(time.lane) or (0, 0)
        stages.setdefault(stage, []).append(time)
        if "receive" in time.exchanges:
            waited = milliseconds(time.exchanges["receive"].ns)
            lines.append(f"{time.lane} waited {waited} ms for the hidden states of the stage before it.")
    for slices in stages.values():
        last = min(slices, key=lambda time: time.waited_ns)
        for time in slices:
            if time is not last:
                ms = milliseconds(time.waited_ns - last.waited_ns)
                lines.append(
                    f"{time.lane} was {ms} ms longer in collectives than {last.lane}, which came last: that is waiting."
                )
    return lines
