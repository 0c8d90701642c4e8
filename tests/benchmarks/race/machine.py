"""The machine: what it is, how many cores are ours, and who else computes on it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""The instruction sets that matter to these engines, x86's and Arm's, as Linux names them."""
QUIET = 0.05  # cores that others may use


def describe() -> dict[str, object]:
    """For the result: CPU model, instruction sets, cores, memory, system, Python."""
    cpu = _cpuinfo()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": len(physical_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def physical_cores() -> tuple[int, ...]:
    """One CPU number for each core that this process may use: two hyper-threads are one core."""
    usable = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(psutil.cpu_count(False) or 1)
    )
    cores: dict[object, int] = {}
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else cpu, cpu)
    return tuple(cores.values())


@dataclass
class Watch:
    """How much CPU time others use: all of the machine's less that of this process and of one engine's."""

    engine: psutil.Process

    def __post_init__(self) -> None:
        self._began, self._others = time.perf_counter(), self._total()

    def others(self) -> float:
        """Cores that others used since the watch began, e.g. 0.5 for one of them half of the time."""
        seconds = time.perf_counter() - self._began
        tick = 0.02  # the system counts in hundredths
        return max(0.0, self._total() - self._others - tick) / max(seconds, tick)

    def _total(self) -> float:
        times = psutil.cpu_times()._asdict()
        busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        return busy - sum(_cpu_seconds(process) for process in [psutil.Process(), *_family(self.engine)])


def wait_until_quiet(engine: psutil.Process, seconds: float) -> None:
    """Return as soon as others compute little, or after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watch = Watch(engine)
        time.sleep(0.5)
        if watch.others() <= QUIET:
            return


def _cpuinfo() -> dict[str, str]:
    """Of the first CPU, where Linux tells."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
