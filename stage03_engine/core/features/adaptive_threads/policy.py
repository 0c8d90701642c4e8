"""How many compute threads the next steps take, decided from how late the calling thread came back from the last ones.

The threads of a step share each matrix product, and the next one begins when the last of them is done. When another program has the core of one, all
wait until the system gives it back, some milliseconds, up to a hundred times a step: so on a busy machine two threads are slower than one. Nothing here
reads a clock: numbers in, a number out.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE = 1.5
"""A window is late if it took longer than this many times the processor time of the thread that called. On two cores, beside other work, that was 2 to 5 with two threads."""
FASTER = 0.95  # a step that takes less than this share of another one is faster: less is noise
LATE_WINDOWS, MOST_LATE_WINDOWS = (
    2,
    128,
)  # one after the other, until there are fewer threads: a single one may be anything
SHORTEST_WAIT, LONGEST_WAIT = 8, 128  # windows that are on time, before one thread more is tried


@dataclass(frozen=True)
class Window:
    """Some forward passes, one after the other."""

    seconds: float
    busy: float  # processor seconds of the thread that called
    steps: int = 1
    tokens: int = 1

    @property
    def late(self) -> bool:
        """Did it wait longer than it should?"""
        return self.seconds > LATE * self.busy

    def compared(self, before: Window) -> int:
        """1 if its steps are faster than those before, -1 if they are slower; 0 if they are as fast, or of another size, which says nothing."""
        if not 0.9 < self.tokens * before.steps / (before.tokens * self.steps) < 1.1:
            return 0
        own, other = self.seconds / self.steps, before.seconds / before.steps
        return (own < FASTER * other) - (other < FASTER * own)


class ThreadPolicy:
    """`threads` is how many the next steps take, 1 to `most`: half as many after late windows, one more after a while without. Both are trials of one window.

    One thread more must be on time or make steps faster, or the wait before the next such trial doubles. Fewer must not be slower while they are on time: else it was no
    harm that the others were late, and it takes twice as many late windows to try again. Windows that are on time with `most` threads make both short again.
    """

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self._num_late, self._patience = 0, LATE_WINDOWS
        self._wait = self._left = SHORTEST_WAIT
        self._before: tuple[int, Window] | None = (
            None  # while a trial runs: the number of threads before it, and their last window
        )

    @property
    def trying(self) -> bool:
        """Is the present number a trial?"""
        return self._before is not None

    def decide(self, window: Window) -> int:
        """The number of threads after this window."""
        if self._before is not None:
            (threads, before), self._before = self._before, None
            if self._judge(threads, window.late, window.compared(before)):
                return self.threads
        self._num_late = self._num_late + 1 if window.late else 0
        if self._num_late >= self._patience and self.threads > 1:
            self._change(self.threads // 2, window)
            self._left = self._wait
        elif not window.late and self.threads == self.most:
            self._wait = max(SHORTEST_WAIT, self._wait - 1)
            self._patience = max(LATE_WINDOWS, self._patience - 1)
        elif not window.late:
            self._left -= 1
            if self._left <= 0:
                self._change(self.threads + 1, window)
                self._left = SHORTEST_WAIT
        return self.threads

    def _change(self, threads: int, window: Window) -> None:
        self._before, self.threads, self._num_late = (self.threads, window), threads, 0

    def _judge(self, before: int, late: bool, faster: int) -> bool:
        """The trial is over. Does the number of threads before it come back?"""
        if self.threads > before and late and faster < 1:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self._left = self._wait
        elif self.threads < before and not late and faster < 0:
            self._patience = min(2 * self._patience, MOST_LATE_WINDOWS)
        else:
            return False
        self.threads = before
        return True
