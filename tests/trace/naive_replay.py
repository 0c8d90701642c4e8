"""The state of the engine after some events, found the slow way: from the first event on, with nothing but the vocabulary's words.
What the player's page shows is compared with it."""

from __future__ import annotations

from typing import Any

from stagetrace import Event


def state_after(events: list[Event]) -> dict[str, Any]:
    """Who waits and runs (request ids in arrival order), tokens of those who run, blocks with their holders, cached blocks,
    free blocks, budget, and messages on the way (places in `events`)."""
    arrived = [e.req for e in events if e.name == "sched.queued"]
    running = {
        r
        for r in arrived
        if last_of(events, r, ("sched.admit", "sched.resume", "sched.preempt", "sched.finished"))
        in ("sched.admit", "sched.resume")
    }
    ended = {e.req for e in events if e.name == "sched.finished"}
    holders, cached = blocks_after(events)
    usable = next((e.args["num_blocks"] - 1 for e in events if e.name == "scheduler.created"), 0)
    in_order = sorted([r for r in arrived if r not in ended], key=arrived.index)
    return {
        "running": [r for r in in_order if r in running],
        "waiting": [r for r in in_order if r not in running],
        "lacks": {r: lacked_by(events, r) for r in in_order if r not in running},
        "tokens": {r: tokens_of(events, r) for r in running},
        "holders": {block: who for block, who in holders.items() if who},
        "cached": cached,
        "free": usable - sum(bool(who) for who in holders.values()),
        "used": sum(chunk + drafts for _, chunk, drafts, _ in (tokens_of(events, r) for r in running)),
        "on_the_way": on_the_way(events),
    }  # fmt: skip


def last_of(events: list[Event], request_id: str | None, names: tuple[str, ...]) -> str | None:
    """The name of the request's latest event among these."""
    return next((e.name for e in reversed(events) if e.req == request_id and e.name in names), None)


def blocks_after(events: list[Event]) -> tuple[dict[int, list[str | None]], set[int]]:
    """(block -> its holders, blocks whose tokens can be found)."""
    holders: dict[int, list[str | None]] = {}
    cached: set[int] = set()
    for e in events:
        if e.name in ("kv.allocated", "sched.prefix_hit"):
            for block in e.args["blocks"]:
                holders.setdefault(block, []).append(e.req)
        elif e.name == "kv.freed":
            for block in e.args["blocks"]:
                holders[block].remove(e.req)
        elif e.name == "kv.cached":
            cached |= set(e.args["blocks"])
        elif e.name == "kv.evicted":
            cached.discard(e.args["block"])
    return holders, cached


def lacked_by(events: list[Event], request_id: str | None) -> int:
    """Tokens that a waiting request must compute: all, unless a preemption copied what it had to CPU memory."""
    own = [e for e in events if e.req == request_id]
    sent_away = [e.args for e in own if e.name == "sched.preempt"]
    kept = sent_away[-1]["num_computed"] if sent_away and sent_away[-1]["swapped"] else 0
    return total_of(own) - kept


def total_of(own: list[Event]) -> int:
    """Tokens of a request: its prompt and what it received."""
    received = sum(e.args["num_tokens"] for e in own if e.name == "sched.token")
    return next(e.args["num_prompt_tokens"] for e in own if e.name == "sched.queued") + received


def tokens_of(events: list[Event], request_id: str | None) -> tuple[int, int, int, int]:
    """(computed, given in the step that goes on, drafts of it, all) tokens of a running request."""
    own = [e for e in events if e.req == request_id or e.name == "engine.step"]
    given = [i for i, e in enumerate(own) if e.name == "sched.scheduled"]
    admitted = max(i for i, e in enumerate(own) if e.name in ("sched.admit", "sched.resume"))
    total = total_of(own)
    if not given or given[-1] < admitted:  # admitted, and the decision about its tokens is the next event
        before = [e.args for e in own if e.name == "sched.preempt"]
        return (before[-1]["num_computed"] if before and before[-1]["swapped"] else 0), 0, 0, total
    last, after = own[given[-1]].args, own[given[-1] :]
    if not any(e.name == "engine.step" for e in after):
        drafts = sum(e.args["num_tokens"] for e in after if e.name == "spec.scheduled")
        return last["num_computed"], last["num_tokens"], drafts, total
    stood = sum(e.args["accepted"] for e in after if e.name == "spec.verified")
    return min(last["num_computed"] + last["num_tokens"] + stood, total), 0, 0, total


def on_the_way(events: list[Event]) -> list[int]:
    """Messages that were sent and not received yet."""
    received = {e.cause for e in events if e.name in ("zmq.request_received", "zmq.outputs_received")}
    sent = ("zmq.request_sent", "zmq.outputs_sent")
    return [i for i, e in enumerate(events) if e.name in sent and e.ref not in received]
