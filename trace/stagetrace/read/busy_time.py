"""Where the time of the processes went: start-up by phase, and the engine's steps by what they did."""

from __future__ import annotations

from dataclasses import dataclass

from stagetrace.event import Event
from stagetrace.read.story import StepStory

STEP_PARTS = {
    "schedule": "the scheduler decides",
    "prepare": "input tensors are built",
    "forward": "the model runs",
    "sample": "logits, rules, and the next tokens",
    "update": "the requests get their tokens, finished ones leave",
    "between": "between two steps: messages are read, or there is nothing to do",
}
"""What the engine does with its time, from its first step to its last."""


_AFTER_A_WAIT = {
    "engine.init_sent",
    "output_handler.started",
    "client.created",
    "dp.engine_joined",
}  # the engine said hello, or that it is ready
_AFTER_WORKERS = {"worker.init_sent", "kv_cache.profiled"}  # they said hello, or that they have loaded the model


_MEASURING = {"worker.collective"}


class StepTime:
    """Sums the parts of the steps of one engine; they add up to the time from the first step's beginning to the last one's end."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0  # computed
        self.parts = dict.fromkeys(STEP_PARTS, 0)
        self._last_end = 0

    def feed(self, step: StepStory) -> None:
        """Process the next complete step."""
        self.num_steps += 1
        self.num_tokens += step.total_tokens
        now = max(step.start_ns, self._last_end)  # with asynchronous scheduling it begins before the last one ends
        if self._last_end:
            self.parts["between"] += now - self._last_end
        marks = {"schedule": step.decided_ns, "prepare": step.forward_ns[0], "forward": step.forward_ns[1],
                 "sample": step.sampled_ns, "update": step.end_ns}  # fmt: skip
        for part, time in marks.items():
            if time > now:  # else it was not recorded, and counts towards the next, or another step was in progress
                self.parts[part] += time - now
                now = time
        self._last_end = step.end_ns

    @property
    def total_ns(self) -> int:
        """From the first step to the last."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StartPart:
    """One thing that a process does before it serves; `rank` is its place in a table."""

    name: str
    phase: int  # 0: of no phase, because the process only waits
    rank: int


_PHASES = {phase: StartPart(name, phase, phase) for phase, name in
           enumerate(("CLI", "serve", "API server", "AsyncLLM", "EngineCore"), start=1)}  # fmt: skip
BIRTH = StartPart("EngineCore: the process starts, and imports torch", 5, 5)  # also of a worker
WAITING = StartPart("waits for the engine", 0, 6)
WAITING_FOR_WORKERS = StartPart("waits for its workers", 0, 7)


class StartUp:
    """What each process did before it served. The time before an event counts towards the event's phase, with two exceptions:

    - A process that another one spawned begins at that moment: until its first event it starts, and imports.
    - A front end whose engine is a process of its own waits from its last own event until the engine says hello, and again
      until the engine is ready. Only the short work after each belongs to a phase, and it has no event of its own.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[str, StartPart], int] = {}  # (process, part) -> nanoseconds
        self._last: dict[int, int] = {}  # pid -> time of its event before
        self._spawned: dict[int, int] = {}  # pid -> when
        self._waiting: set[int] = set()  # pids that spawned an engine
        self._employers: set[int] = set()  # pids that spawned workers
        self._first: dict[str, int] = {}  # name -> the first pid that has it: an engine may be started again
        self._servers: set[int] = set()  # pids with a port: only `server.listening` ends their start
        self._serving: set[int] = set()

    def feed(self, event: Event) -> None:
        """Process the next event."""
        pid = event.pid
        if event.name == "server.socket_bound":
            self._servers.add(pid)
        if event.name in ("engine.spawned", "worker.spawned"):
            self._spawned[event.args["pid"]] = event.ts
        if pid in self._serving or event.phase == 0:
            return
        if event.name in _MEASURING:  # a worker tries the largest step, before it serves
            return
        if event.phase >= 6:  # of a server that loads: somebody asks for its health
            if pid not in self._servers:
                self._serving.add(pid)
            return
        another = "" if self._first.setdefault(event.proc, pid) == pid else f" ({pid})"
        key = event.proc + another, self._part(event)
        began = self._last.get(pid, self._spawned.get(pid, event.ts))
        self.parts[key] = self.parts.get(key, 0) + event.ts - began
        self._last[pid] = event.ts
        if event.name in ("engine.spawned", "api_server.started"):  # for one of several servers somebody else spawns it
            self._waiting.add(pid)
        elif event.name == "worker.spawned":
            self._employers.add(pid)
        elif event.name in ("server.listening", "engine.busy_loop"):
            self._serving.add(pid)

    def _part(self, event: Event) -> StartPart:
        if event.pid in self._spawned and event.pid not in self._last:
            return BIRTH
        if event.pid in self._waiting and event.name in _AFTER_A_WAIT:
            return WAITING
        if event.pid in self._employers and event.name in _AFTER_WORKERS:
            return WAITING_FOR_WORKERS
        return _PHASES[event.phase]
