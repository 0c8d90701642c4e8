"""What this process may use of the CPU (vllm/v1/worker/cpu_worker.py).

A compute thread per physical core, and each spins a little while it waits, then sleeps (`WAITING` in command.py). GPT-2's shape, float32,
one stream on two cores of an AMD EPYC, in turns, decode tokens/s (the median of five answers in a process; three processes where nothing
else ran, two beside a program that kept one core busy), November 2026:

    GOMP_SPINCOUNT    nothing else runs    one core is taken
    0                   41, 48, 43             38, 37
    1,000               44, 47, 45             28, 37
    4,000               49, 49, 52             29, 28
    10,000              51, 65, 62             27, 32
    20,000              51, 49, 50             28, 31

The bound matters: at a load of 15 on the same cores, 100,000 rounds left a stream 1.3 tokens/s of 17. `GOMP_SPINCOUNT=0` is the better
choice for a machine that is busy with other work. A lower priority of the API process (nice 5) changed nothing that showed: it needs
some tens of microseconds a token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf

from stage03_engine.plugins import find


@dataclass(frozen=True)
class Cores:
    """What a process may use. `logical` counts hardware threads, `physical` those that share no core with another one; the quota of
    a container, in cores, limits both. All are at least 1."""

    logical: int
    physical: int
    quota: float = inf

    @property
    def usable(self) -> int:
        """How many threads can run at once."""
        return max(1, min(self.logical, int(min(self.quota, self.logical))))

    @property
    def compute(self) -> int:
        """How many can compute at once: two hardware threads of one core share its arithmetic units."""
        return min(self.physical, self.usable)

    def __str__(self) -> str:
        words = [f"{self.physical} cores"]
        if self.logical != self.physical:
            words.append(f"{self.logical} hardware threads")
        if self.quota < self.physical:
            words.append(f"quota {self.quota:g}")
        return ", ".join(words)


def find_cores() -> Cores:
    """What this process may use. Without the feature `cores`, each hardware thread that its affinity mask allows counts as a core."""
    if measure := find("engine", "cores"):
        found: Cores = measure()
        return found
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cores(count, count)
