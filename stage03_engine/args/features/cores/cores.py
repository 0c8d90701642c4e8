"""Which hardware threads share a core, and how much of the cores a container may use (vllm/utils/ompmultiprocessing.py, _get_autobind_cpu_ids).

Every function takes the root of the file system, so that a test can show it another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from stage03_engine.args.cpu import Cores

_ROOT = Path("/")


@dataclass(frozen=True)
class Limited(Cores):
    """Cores of which the user lets only so many compute, by the variable that OpenMP and torch heed as well."""

    threads: int = 1

    @property
    def compute(self) -> int:
        """How many can compute at once, and may."""
        return min(super().compute, self.threads)

    def __str__(self) -> str:
        return f"{super().__str__()}, OMP_NUM_THREADS {self.threads}"


def measure(root: Path = _ROOT) -> Cores:
    """The cores in this process's affinity mask, the quota of its control group, and what OMP_NUM_THREADS says (of a list, its first
    number; what is no number is ignored, as OpenMP does). torchrun sets it to 1 on any machine, so there it says nothing."""
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        found = Cores(len(allowed), count_physical(allowed, root), find_quota(root))
    else:
        import psutil  # a system without affinity masks, such as macOS

        logical = os.cpu_count() or 1
        found = Cores(logical, psutil.cpu_count(logical=False) or logical)
    given = "" if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get("OMP_NUM_THREADS", "")
    first = given.partition(",")[0].strip()
    threads = int(first) if first.isascii() and first.isdecimal() and len(first) < 6 else 0
    return Limited(found.logical, found.physical, found.quota, threads) if threads else found


def count_physical(allowed: set[int], root: Path = _ROOT) -> int:
    """How many physical cores these hardware threads belong to. One whose siblings are not known counts as a core."""
    return len({_siblings(number, root) for number in allowed})


def _siblings(number: int, root: Path) -> frozenset[int]:
    """The hardware threads of one core, from lists such as `0,64` and `0-1`."""
    folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the newer and the older name
        try:
            found = frozenset(_numbers((folder / name).read_text()))
        except (OSError, ValueError):
            continue
        if number in found:
            return found
    return frozenset([number])


def _numbers(text: str) -> Iterator[int]:
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not 0 <= int(last or first) - int(first) < 4096:  # more threads than a core has
            raise ValueError(f"not a range: {part}")
        yield from range(int(first), int(last or first) + 1)


def find_quota(root: Path = _ROOT) -> float:
    """Cores' worth of time that the control group of this process and those around it allow; infinite if none says anything."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    quotas = [inf]
    for line in ["0::/", *lines]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup" / controllers, _quota_v1
            base = base if base.exists() else root / "sys/fs/cgroup/cpu"
        else:
            continue
        own = Path(path.strip("/"))
        if ".." not in own.parts:
            quotas += [read(base / folder) for folder in (own, *own.parents)]
    return min(quotas)


def _quota_v2(folder: Path) -> float:
    return _quota(folder, "cpu.max")


def _quota_v1(folder: Path) -> float:
    return _quota(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us")


def _quota(folder: Path, *names: str) -> float:
    """Microseconds of time in each period; `max` or -1 is no limit, and what cannot be understood is none either."""
    try:
        quota, period = " ".join((folder / name).read_text() for name in names).split()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return inf
    return cores if cores > 0 else inf
