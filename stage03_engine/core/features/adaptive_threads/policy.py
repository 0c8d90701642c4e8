"""How many compute threads the next steps take, decided from how late the calling thread came back from the last ones.

The threads of a step share each matrix product, and the next one begins when the last of them is done. When another program has the core of one, all
wait until the system gives it back, some milliseconds, up to a hundred times a step: so on a busy machine two threads are slower than one. Nothing here
reads a clock: numbers in, a number out.
"""

from __future__ import annotations

LATE = 1.5
"""A window is late if it took longer than this many times the processor time of the thread that called. On two cores with nothing else to do that was
1.0 to 1.1, beside other work 2 and more with two threads."""
LATE_WINDOWS = 2  # one after the other, until there are fewer threads: a single one may be anything
SHORTEST_WAIT, LONGEST_WAIT = 8, 128  # windows that are on time, before one thread more is tried


class ThreadPolicy:
    """`threads` is how many the next steps take, 1 to `most`: half as many after late windows, one more after a while without.

    One more is a trial of one window. Each time that more threads turn out to be too many, the wait before the next trial doubles; each window that is on time with
    `most` threads shortens it.
    """

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self.trying = False
        self._num_late = 0
        self._wait = self._left = SHORTEST_WAIT

    def decide(self, seconds: float, busy_seconds: float) -> int:
        """The number of threads after a window that took `seconds`, of which the calling thread computed `busy_seconds`."""
        late = seconds > LATE * busy_seconds
        was_trying, self.trying = self.trying, False
        self._num_late = self._num_late + 1 if late else 0
        if late and self.threads > 1 and (was_trying or self._num_late == LATE_WINDOWS):
            self._take_fewer(self.threads - 1 if was_trying else self.threads // 2)
        elif not late and self.threads < self.most:
            self._left -= 1
            if self._left <= 0:
                self.threads, self.trying = self.threads + 1, True
                self._left = SHORTEST_WAIT
        elif not late:
            self._wait = max(SHORTEST_WAIT, self._wait - 1)
        return self.threads

    def _take_fewer(self, threads: int) -> None:
        self.threads, self._num_late = threads, 0
        self._left = self._wait
        self._wait = min(2 * self._wait, LONGEST_WAIT)
