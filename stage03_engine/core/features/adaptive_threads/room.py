"""How many cores other programs leave to this one, as Linux counts it in /proc/stat."""

from __future__ import annotations

import os
from collections.abc import Collection
from time import monotonic, process_time

SECONDS = 0.2  # the system counts in hundredths of a second
LONGEST = 1.0  # older than that a count says nothing about now
IDLE = (1, 3, 4)  # of user, nice, system, idle, iowait, irq, softirq, steal: niced programs give way, the others do not


def busy_seconds(text: str, cores: Collection[int], ticks: int) -> float:
    """Processor time that /proc/stat counts on these cores, that of a hypervisor's other guests (steal) included. Raises ValueError if it does not list them all."""
    names, total, found = {f"cpu{core}" for core in cores}, 0, 0
    for line in text.splitlines():
        name, *numbers = line.split()
        if name in names:
            total += sum(int(number) for place, number in enumerate(numbers[:8]) if place not in IDLE)
            found += 1
    if found < len(names):
        raise ValueError("cores without a line")
    return total / ticks


def own_seconds() -> float:
    """What this process has added to `busy_seconds`: under `nice` only its time in the kernel."""
    return process_time() if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else os.times().system


class Room:
    """Measures while it is asked: `now` is the number of cores in the last fifth of a second, None while that is not known."""

    def __init__(self, path: str = "/proc/stat") -> None:
        self.path = path
        self.cores: Collection[int] = getattr(os, "sched_getaffinity", lambda _: ())(0)
        self._before: tuple[float, float] | None = None  # when, and the processor time of others until then
        self._found: float | None = None

    def now(self) -> float | None:
        """Most calls compare two numbers; one in a fifth of a second reads a file."""
        now = monotonic()
        if self._before is not None and now - self._before[0] < SECONDS:
            return self._found
        before, self._before, self._found = self._before, None, None
        if not self.cores:
            return None
        try:
            with open(self.path, encoding="ascii") as file:
                others = busy_seconds(file.read(), self.cores, os.sysconf("SC_CLK_TCK")) - own_seconds()
        except (OSError, ValueError):
            self.cores = ()  # there is no such file here: do not ask again
            return None
        self._before = (now, others)
        if before is not None and now - before[0] < LONGEST:
            self._found = len(self.cores) - (others - before[1]) / (now - before[0])
        return self._found
