"""How many compute threads the next steps take, decided after each step from how late the calling thread came back from it.

The threads of a step share each matrix product, and the next one begins when the last of them is done. When another program has the core of one, all
wait until the system gives it back, some milliseconds, up to a hundred times a step: so on a busy machine two threads are slower than one, and a step may
take a second. Nothing here reads a clock: numbers in, a number out.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE = 1.3
"""A step is late by the time that it took beyond this many times the processor time of the thread that called. On two cores with two threads steps took 1.0 to 1.1
times that on a quiet machine, 1.5 to 1.7 beside one busy loop, and 3 to 6 beside four."""
LATENESS, MOST_LATENESS = (
    0.03,
    2.0,
)  # seconds that steps may be late, until there are fewer threads: one interruption is shorter
FASTER = 0.95  # a step that takes less than this share of another one is faster: less is noise
TRIAL_STEPS, TRIAL_SECONDS = 4, 0.05  # a trial is as long as both ask for
HALF_A_CORE = 0.5  # is enough for one thread more: the server's own processes need some of it
WAITS: dict[bool | None, tuple[float, float]] = {True: (0.4, 6.4), None: (0.4, 6.4), False: (6.4, 102.4)}
"""Is a core free for one thread more (None: not known)? -> seconds before it is tried: at first, and after many trials that failed."""


@dataclass(frozen=True)
class Window:
    """Some forward passes, one after the other."""

    seconds: float
    busy: float  # processor seconds of the thread that called
    steps: int = 1
    tokens: int = 1

    def __add__(self, other: Window) -> Window:
        return Window(
            self.seconds + other.seconds, self.busy + other.busy, self.steps + other.steps, self.tokens + other.tokens
        )

    @property
    def lateness(self) -> float:
        """Seconds that it waited longer than it should; less than 0 if it was on time."""
        return self.seconds - LATE * self.busy

    def compared(self, before: Window) -> int:
        """1 if its steps are faster than those before, -1 if they are slower; 0 if they are as fast, or of another size, which says nothing."""
        if not 0.9 < self.tokens * before.steps / (before.tokens * self.steps) < 1.1:
            return 0
        own, other = self.seconds / self.steps, before.seconds / before.steps
        return (own < FASTER * other) - (other < FASTER * own)


NOTHING = Window(0.0, 0.0, 0, 0)


class ThreadPolicy:
    """`threads` is how many the next steps take, 1 to `most`. `why` is the reason of the last change, and `late` how many times their
    processor time the steps before it took.

    Lateness adds up, and steps that are on time pay it off: so a load is noticed after some hundredths of a second, or after one long step, and an interruption is not. Then half as
    many threads go on. More are taken once other programs have left cores free for a moment; where that cannot be seen, after a while on time; and where there is none, very
    rarely, for what is seen may be wrong. Both are trials: threads that came back and are late again wait twice as long the next time. Fewer must not be
    slower while they are on time: else it was no harm that the others were late, and twice the lateness is borne. A time on time with `most` threads makes all that short again.
    """

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self.why, self.late = "", 0.0
        self._lateness, self._borne = 0.0, LATENESS
        self._free: bool | None = None
        self._waits = {free: shortest for free, (shortest, _) in WAITS.items()}
        self._since = 0.0  # seconds with fewer threads, while `_free` stayed the same
        self._window = NOTHING  # since the last change, or the last window that was long enough
        self._before: tuple[int, Window] | None = (
            None  # during a trial: the number of threads before it, and their steps
        )
        self._tried: set[bool | None] = set()  # what `_free` was when there were more the last time; none yet

    @property
    def trying(self) -> bool:
        """Is the present number a trial?"""
        return self._before is not None

    def decide(self, step: Window, room: float | None = None) -> int:
        """The number of threads after this step. `room` is how many cores other programs leave to this one, None if that is not known; nobody need measure
        it while there are `most`."""
        self._lateness = min(max(self._lateness + step.lateness, 0.0), self._borne)
        window = self._window = self._window + step
        late = self._lateness >= self._borne
        long = window.steps >= TRIAL_STEPS and window.seconds >= TRIAL_SECONDS
        if self._before is not None:
            self._judge(*self._before, late, long)
        elif late and self.threads > 1:
            self._fail()
            self._change(max(1, self.threads // 2), "late", trial=True)
        elif self.threads < self.most:
            self._wait(step, room)
        elif not self._lateness:
            self._forgive(step.seconds)
        if long and self._window is window:
            self._window = step
        return self.threads

    def _change(self, threads: int, why: str, *, trial: bool) -> None:
        self._before = (self.threads, self._window) if trial else None
        self.threads, self.why = threads, why
        self.late = self._window.seconds / max(self._window.busy, 1e-9)
        self._lateness, self._since, self._window, self._free = 0.0, 0.0, NOTHING, None

    def _judge(self, threads: int, before: Window, late: bool, long: bool) -> None:
        """A trial runs. Is it over, and does the number of threads before it come back?"""
        faster = self._window.compared(before)
        if self.threads > threads and late and faster < 1:
            self._fail()
            self._change(threads, "late again", trial=False)
        elif long and self.threads < threads and self._window.lateness <= 0 and faster < 0:
            self._borne = min(2 * self._borne, MOST_LATENESS)
            self._change(threads, "slower", trial=False)
        elif long:
            self._before = None

    def _wait(self, step: Window, room: float | None) -> None:
        """There are fewer threads than there may be: is it time to try more?"""
        free = None if room is None else room >= self.threads + HALF_A_CORE
        self._since = self._since + step.seconds if free == self._free else 0.0
        self._free = free
        if free is None and self._lateness:  # threads that are late themselves need no others
            self._since = 0.0
        if self._since >= self._waits[free]:
            self._tried = {free}
            more = int(room - HALF_A_CORE) + 1 if free and room is not None else self.threads + 1
            self._change(min(more, self.most), "free cores" if free else "a try", trial=True)

    def _fail(self) -> None:
        """Threads are late: what led to so many is believed less."""
        for free in self._tried:
            self._waits[free] = min(2 * self._waits[free], WAITS[free][1])

    def _forgive(self, seconds: float) -> None:
        for free, (shortest, _) in WAITS.items():
            self._waits[free] = max(shortest, self._waits[free] - seconds)
        self._borne = max(LATENESS, self._borne - seconds / 4)
