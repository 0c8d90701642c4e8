"""Where the time of the processes went: start-up by phase, and the engine's steps by what they did."""

from __future__ import annotations

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


class StepTime:
    """Sums the parts of all steps; they add up to the time from the first step's beginning to the last one's end."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0  # computed
        self.parts = dict.fromkeys(STEP_PARTS, 0)
        self._last_end = 0

    def feed(self, step: StepStory) -> None:
        """Process the next complete step."""
        self.num_steps += 1
        self.num_tokens += step.total_tokens
        if self._last_end:
            self.parts["between"] += step.start_ns - self._last_end
        now = step.start_ns
        marks = {"schedule": step.decided_ns, "prepare": step.forward_ns[0], "forward": step.forward_ns[1],
                 "sample": step.sampled_ns, "update": step.end_ns}  # fmt: skip
        for part, time in marks.items():
            if time:  # else it was not recorded, and counts towards the next
                self.parts[part] += time - now
                now = time
        self._last_end = step.end_ns

    @property
    def total_ns(self) -> int:
        """From the first step to the last."""
        return sum(self.parts.values())


class StartUp:
    """What each process did before it served, by phase: the time before an event counts towards the event's phase."""

    def __init__(self) -> None:
        self.phases: dict[tuple[str, int], int] = {}  # (process, phase) -> nanoseconds
        self._last: dict[int, int] = {}  # pid -> time of its event before
        self._serving: set[int] = set()  # pids

    def feed(self, event: Event) -> None:
        """Process the next event."""
        if event.pid in self._serving or event.phase == 0:
            return
        if event.phase >= 6:
            self._serving.add(event.pid)
            return
        key = (event.proc, event.phase)
        self.phases[key] = self.phases.get(key, 0) + event.ts - self._last.get(event.pid, event.ts)
        self._last[event.pid] = event.ts
        if event.name in ("server.listening", "engine.busy_loop"):
            self._serving.add(event.pid)
