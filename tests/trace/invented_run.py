"""An engine that exists only as events: decisions at random, and beside them a plain record of what was true.

What figures say is compared with that record. It is kept step by step, in the most obvious way, and shares no code with
stagetrace.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from stagetrace.event import Event

ENGINE, FRONT_END = 22, 11  # pids


@dataclass
class Guest:
    """A request, as the record knows it."""

    name: str
    num_tokens: int
    state: str = "wait"
    computed: int = 0
    caught_up: bool = False  # since it was admitted last
    blocks: list[int] = field(default_factory=list)


@dataclass
class InventedRun:
    """`step()` and `leave()` write `events`; the other fields say what was true at each decision."""

    rng: random.Random
    num_blocks: int = 24
    budget: int = 40
    events: list[Event] = field(default_factory=list)
    guests: dict[str, Guest] = field(default_factory=dict)
    kinds: list[dict[str, str]] = field(default_factory=list)  # per step: request -> what it did
    tokens: list[dict[str, int]] = field(default_factory=list)  # per step: request -> tokens, drafts not counted
    drafts: list[dict[str, int]] = field(default_factory=list)
    holders: list[dict[int, set[str]]] = field(default_factory=list)  # per step: block -> who holds it
    findable: list[set[int]] = field(default_factory=list)  # per step: blocks that hold cached tokens
    cached: set[int] = field(default_factory=set)
    count: int = 0

    def emit(
        self,
        name: str,
        req: str | None = None,
        ph: str = "i",
        step: int | None = None,
        pid: int = ENGINE,
        cause: str | None = None,
        **args: Any,
    ) -> str:
        seq = len(self.events) + 1
        proc = "EngineCore_DP0" if pid == ENGINE else "APIServer"
        self.events.append(Event(1, seq, 1000 * seq, pid, proc, ph, name, 8, "x.py:1", req, step, cause, args))
        return f"{pid}:{seq}"

    def created(self) -> None:
        self.emit("scheduler.created", num_blocks=self.num_blocks, max_num_seqs=99, max_num_batched_tokens=self.budget)

    def arrive(self, num_tokens: int) -> str:
        name = f"cmpl-r{self.count}-{self.count:08x}-0"
        self.count += 1
        self.emit("http.request", name, pid=FRONT_END)
        sent = self.emit("zmq.request_sent", name, pid=FRONT_END, type="ADD", bytes=9)
        self.emit("zmq.request_received", name, cause=sent, type="ADD")
        self.guests[name] = Guest(name, num_tokens)
        self.emit("sched.queued", name, waiting=1, num_prompt_tokens=num_tokens, params={}, block_hashes=[])
        return name

    def held(self) -> dict[int, set[str]]:
        holders: dict[int, set[str]] = {}
        for guest in self.guests.values():
            for block in guest.blocks:
                holders.setdefault(block, set()).add(guest.name)
        return holders

    def step(self, finish_step: bool = True) -> None:
        number = len(self.kinds) + 1
        running = [guest for guest in self.guests.values() if guest.state == "run"]
        others = len(self.guests) - len(running)
        self.emit("engine.step", ph="B", step=number, running=len(running), waiting=others)
        kinds, tokens, drafts = {}, {}, {}
        left = self.budget
        for guest in list(self.guests.values()):
            if guest.state == "run" and self.rng.random() < 0.08:
                self.preempt(guest, number)
            elif guest.state != "run" and self.rng.random() < 0.6 and left:
                self.admit(guest, number)
            if guest.state == "run" and left and self.rng.random() < 0.9:
                count = self.rng.randint(1, min(left, guest.num_tokens - guest.computed))
                self.give(guest, count, number, left)
                kinds[guest.name] = "decode" if guest.caught_up else "prefill"
                tokens[guest.name] = count
                left -= count
                guest.computed += count
                guest.caught_up |= guest.computed == guest.num_tokens
                if guest.computed == guest.num_tokens and left and self.rng.random() < 0.2:
                    drafts[guest.name] = self.rng.randint(1, left)
                    left -= drafts[guest.name]
                    self.emit("spec.scheduled", guest.name, step=number, num_tokens=drafts[guest.name], new_blocks=[])
            else:
                kinds[guest.name] = {"run": "no tokens"}.get(guest.state, guest.state)
        holders = self.held()
        free = self.num_blocks - 1 - len(holders)
        self.emit("sched.output", step=number, total_tokens=self.budget - left, budget=self.budget, free_blocks=free)
        for record, now in ((self.kinds, kinds), (self.tokens, tokens), (self.drafts, drafts), (self.holders, holders)):
            record.append(now)  # type: ignore[attr-defined]
        self.findable.append(set(self.cached))
        if finish_step:
            self.finish_step(number, tokens)

    def finish_step(self, number: int, tokens: dict[str, int]) -> None:
        self.emit("model.forward", ph="B", step=number, num_tokens=1)
        self.emit("model.forward", ph="E", step=number, num_tokens=1)
        sampled = []
        for guest in [self.guests[name] for name in tokens]:
            if guest.computed == guest.num_tokens:
                sampled.append(guest.name)
                guest.num_tokens += 1
                self.emit(
                    "sched.token",
                    guest.name,
                    step=number,
                    num_tokens=1,
                    sampled=1,
                    num_output_tokens=1,
                    token_ids=[],
                    block_hashes=[],
                )
                if self.rng.random() < 0.1:
                    self.leave(guest, "length", number)
        sent = self.emit("zmq.outputs_sent", step=number, num_outputs=1, bytes=9)
        self.emit("engine.step", ph="E", step=number, running=0, waiting=0)
        self.emit("zmq.outputs_received", step=number, pid=FRONT_END, cause=sent, num_outputs=1)
        for name in sampled:
            self.emit("request.detokenized", name, pid=FRONT_END, num_tokens=1, characters=4)
            self.emit("generate.yield", name, pid=FRONT_END, finished=False)
            self.emit("sse.chunk", name, pid=FRONT_END, bytes=3)

    def admit(self, guest: Guest, number: int) -> None:
        found = [b for b in sorted(self.cached) if self.rng.random() < 0.2][:2]
        self.take(guest, self.rng.randint(0, 2), found)
        guest.blocks += found
        if found:
            self.emit("sched.prefix_hit", guest.name, step=number, blocks=found, num_tokens=16)
        name = "sched.admit" if guest.state == "wait" else "sched.resume"
        self.emit(name, guest.name, step=number, new_blocks=guest.blocks, num_prompt_tokens=guest.num_tokens)
        guest.state, guest.caught_up = "run", False

    def take(self, guest: Guest, count: int, but: list[int]) -> None:
        """New blocks, of those that nobody holds and that are not about to be hit; what they held is evicted."""
        free = [b for b in range(1, self.num_blocks) if b not in self.held() and b not in but]
        blocks = self.rng.sample(free, min(count, len(free)))
        for block in blocks:
            if block in self.cached:
                self.cached.discard(block)
                self.emit("kv.evicted", block=block)
        if blocks:
            self.emit("kv.allocated", guest.name, blocks=blocks)
        guest.blocks += blocks

    def give(self, guest: Guest, count: int, number: int, left: int) -> None:
        if self.rng.random() < 0.3:
            self.take(guest, 1, [])
        new = [b for b in guest.blocks if b not in self.cached and self.rng.random() < 0.5]
        if new:
            self.cached.update(new)
            self.emit("kv.cached", guest.name, blocks=new)
        missing = guest.num_tokens - guest.computed
        self.emit(
            "sched.scheduled",
            guest.name,
            step=number,
            num_tokens=count,
            num_computed=guest.computed,
            missing=missing,
            budget_left=left,
            new_blocks=[],
        )

    def preempt(self, guest: Guest, number: int) -> None:
        self.free(guest)
        self.emit(
            "sched.preempt",
            guest.name,
            step=number,
            freed_blocks=1,
            num_computed=guest.computed,
            swapped=False,
            needed_by="x",
            free_before=0,
        )
        guest.state, guest.computed = "preempted", 0

    def free(self, guest: Guest) -> None:
        if guest.blocks:
            self.emit("kv.freed", guest.name, blocks=guest.blocks[::-1])
        guest.blocks = []

    def leave(self, guest: Guest, reason: str, number: int | None = None) -> None:
        """The end of a request, in a step or (an abort) between two."""
        self.free(guest)
        self.emit(
            "sched.finished", guest.name, step=number or len(self.kinds), reason=reason, freed_blocks=0, by=reason
        )
        self.emit("request.finished", guest.name, pid=FRONT_END, reason=reason, num_output_tokens=1)
        del self.guests[guest.name]

    def reset(self) -> None:
        """Cached prefixes are to be forgotten; nothing happens while somebody holds a block."""
        done = not self.held()
        if done:
            self.cached.clear()
        self.emit("kv.reset", done=done)


def invent(seed: int, num_steps: int, num_requests: int, num_blocks: int = 24) -> InventedRun:
    """A run of so many steps; the same for the same seed."""
    rng = random.Random(seed)
    run = InventedRun(rng, num_blocks)
    run.created()
    for _ in range(num_steps):
        if run.count < num_requests and rng.random() < 2 * num_requests / num_steps:
            run.arrive(rng.randint(1, 60))
        if run.guests and rng.random() < 0.03:
            run.leave(rng.choice(list(run.guests.values())), "abort")
        if rng.random() < 0.05:
            run.reset()
        run.step()
    return run
