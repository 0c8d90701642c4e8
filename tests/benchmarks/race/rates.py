"""What the machine can do at best, measured: `python -m race.rates THREADS SECONDS`, in our Python, prints it as
JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from race.entrant import ROOT, Command

BYTES = 1 << 28  # of each of the two buffers: larger than any cache
SIZE = 2048  # of the square matrices
TRIES = 20  # at most; the best one counts, as what others compute meanwhile must not lower a limit


def measure_rates(threads: int, seconds: float) -> dict[str, float]:
    """In a process of its own, which ends; `seconds` for each rate, roughly. Raises OSError, ValueError."""
    words = [sys.executable, "-m", "race.rates", str(threads), str(seconds)]
    command = Command(words, {"OMP_NUM_THREADS": str(threads)})
    result = subprocess.run(
        command.argv, env=command.environ(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if result.returncode != 0:
        raise ValueError(f"the machine's rates: {(result.stderr.strip() or 'nothing was said').splitlines()[-1]}")
    rates: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return rates


def _measure(threads: int, seconds: float) -> dict[str, float]:
    """`copy` and `read` are bytes per second, the rest is operations per second of matrix products by type: a multiplication
    and an addition are two. A type that torch cannot multiply here is left out."""
    import torch

    torch.set_num_threads(threads)
    source = torch.zeros(BYTES // 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    rates = {
        "copy": 2 * BYTES / _best(lambda: target.copy_(source), seconds),  # read, and written
        "read": BYTES / _best(source.sum, seconds),
    }
    whole = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
    square = whole.float()
    pairs = square.bfloat16()
    products: dict[str, Callable[[], object]] = {
        "float32": lambda: square @ square, "bfloat16": lambda: pairs @ pairs, "int8": lambda: torch._int_mm(whole, whole),
    }  # fmt: skip
    for name, product in products.items():
        try:
            rates[name] = 2 * SIZE**3 / _best(product, seconds)
        except (RuntimeError, NotImplementedError):
            continue
    return rates


def _best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call, without the first one."""
    call()
    times: list[float] = []
    while len(times) < TRIES and sum(times) < seconds:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    print(json.dumps({name: round(rate) for name, rate in _measure(int(sys.argv[1]), float(sys.argv[2])).items()}))
