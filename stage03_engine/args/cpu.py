"""What this process may use of the CPU, and which number format is fastest on it; found without torch.

vLLM: vllm/v1/worker/cpu_worker.py (_get_autobind_cpu_ids) and vllm/platforms/cpu.py. Every function takes the root of the file
system, so that a test can show it another machine.

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
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stage03_engine.model_shape import ModelShape


_ROOT = Path("/")
_FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16")  # as the kernel calls them
LARGE = 128 * 2**20  # bytes of float32 weights: more than the caches of nearly all CPUs


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


def find_cores(root: Path = _ROOT) -> Cores:
    """The cores in this process's affinity mask, and the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        return Cores(len(allowed), count_physical(allowed, root), find_quota(root))
    import psutil  # a system without affinity masks, such as macOS

    logical = os.cpu_count() or 1
    return Cores(logical, psutil.cpu_count(logical=False) or logical)


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


def bfloat16_flag(root: Path = _ROOT) -> str | None:
    """The instructions that make bfloat16 fast here, as /proc/cpuinfo names them; None if there are none, or if it does not say."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except (OSError, ValueError):
        return None
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return next((flag for flag in _FAST_BFLOAT16 if flag in flags), None)


def weight_bytes(shape: ModelShape) -> int:
    """About how many bytes the matrices of a model take in float32."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = shape.hidden_size * (heads + 2 * shape.intermediate_size)
    return 4 * (shape.num_layers * layer + shape.vocab_size * shape.hidden_size)


def cpu_dtype(shape: ModelShape, root: Path = _ROOT) -> tuple[str, str]:
    """(number format on a CPU, what decided).

    A step reads every weight once. If they come from memory, half the bytes are half the time, where the CPU multiplies
    bfloat16 without a detour; weights that stay in its cache gain nothing, and keep answers that are the same on every machine.
    """
    if weight_bytes(shape) <= LARGE:
        return "float32", "a small model on a CPU"
    if (flag := bfloat16_flag(root)) is not None:
        return "bfloat16", f"the CPU has {flag}"
    return "float32", f"the CPU ({platform.machine()}) has neither AMX nor AVX512-BF16"


def compute_threads(cores: Cores, engines: int = 1) -> int:
    """Compute threads of each of `engines` engine processes that share these cores, at least 1."""
    return max(1, cores.compute // engines)
