"""How fast a recording is read, and that the memory for it does not grow with it (`make bench`).

By hand for a large one: `python tests/benchmarks/test_bench_recording.py trace/recorded/mixed /tmp/large 1000` writes 1,000 MB.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from stagetrace import Event
from stagetrace.event import decode_line, encode_line

RECORDED = Path(__file__).parents[2] / "trace" / "recorded" / "mixed"
# Not getrusage: its maximum begins with that of the process that started this one.
REPORT = (
    "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)"
)
ITERATE = f"import sys; from stagetrace import Recording; any(False for _ in Recording(sys.argv[1])); {REPORT}"
STATS = f"import sys; from stagetrace.__main__ import main; main(['stats', sys.argv[1]]); {REPORT}"
JOBS = {
    "iterate": ITERATE,
    "stats": STATS,
    "view": STATS.replace("stats", "view"),
    "show": STATS.replace("stats", "show"),
}


def multiply(source: Path, target: Path, megabytes: float) -> None:
    """Write what the recorded server would have recorded, had the same requests come again and again."""
    target.mkdir(parents=True, exist_ok=True)
    lanes = {
        path: [decode_line(line) for line in path.read_bytes().splitlines()] for path in sorted(source.glob("*.jsonl"))
    }
    events = [event for lane in lanes.values() for event in lane]
    tops = {event.pid: 0 for event in events}
    for event in events:
        tops[event.pid] = max(tops[event.pid], event.seq)
    duration = max(event.ts for event in events) - min(event.ts for event in events) + 1
    steps = max(event.step or 0 for event in events)
    copies = int(megabytes * 1e6 / sum(path.stat().st_size for path in lanes)) + 1
    for path, lane in lanes.items():
        with open(target / path.name, "wb") as file:
            for copy in range(copies):
                for event in lane:
                    if event.phase >= 6 or copy == 0:  # it starts up once
                        file.write(encode_line(_moved(event, copy, tops, duration, steps)))


def _moved(event: Event, copy: int, tops: dict[int, int], duration: int, steps: int) -> Event:
    cause = event.cause
    if cause is not None:
        pid, seq = map(int, cause.split(":"))
        cause = f"{pid}:{seq + copy * tops[pid]}"
    return msgspec.structs.replace(
        event,
        seq=event.seq + copy * tops[event.pid] if event.seq else 0,
        ts=event.ts + copy * duration,
        req=None if event.req is None else f"{event.req}-{copy}",
        step=None if event.step is None else event.step + copy * steps,
        cause=cause,
    )


def measure(job: str, folder: Path) -> tuple[float, int]:
    """Seconds, and megabytes of memory at the peak, of a process that does nothing else."""
    started = time.perf_counter()
    command = [sys.executable, "-c", JOBS[job], str(folder)]
    result = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return time.perf_counter() - started, int(result.stderr) >> 10


@pytest.mark.parametrize("job", JOBS)
def test_reading_in_bounded_memory(benchmark: BenchmarkFixture, tmp_path: Path, job: str) -> None:
    """A recording and one five times as large: megabytes a second, and the ratio of the memory."""
    multiply(RECORDED, tmp_path / "small", 5)
    multiply(RECORDED, tmp_path / "large", 25)
    _, small = measure(job, tmp_path / "small")
    seconds, large = benchmark.pedantic(lambda: measure(job, tmp_path / "large"), rounds=1)
    benchmark.extra_info["megabytes_per_second"] = round(25 / seconds, 1)
    benchmark.extra_info["peak_megabytes"] = large
    benchmark.extra_info["memory_ratio_of_five_times_the_recording"] = round(large / small, 2)


if __name__ == "__main__":
    multiply(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
