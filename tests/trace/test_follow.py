"""`view --follow`: events appear while they are written, processes while they start, and it ends with the run."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagetrace import Event
from stagetrace.event import encode_line
from stagetrace.read.follow import Follower

WRITER = """if True:
    import sys
    from stagetrace import trace
    trace.proc = sys.argv[2]
    trace.open(sys.argv[1])
    for line in sys.stdin:
        trace.emit("sched.queued", req=line.strip(), waiting=0)
        trace.flush()
    trace.close()
"""


@pytest.fixture
def start() -> Iterator:
    processes: list[subprocess.Popen[str]] = []

    def run(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen([sys.executable, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def until(process: subprocess.Popen[str], word: str) -> list[str]:
    """Read its output up to a line with this word (the time limit of the test ends a vain wait)."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"ended without {word}: {lines}")


def test_a_live_run(tmp_path: Path, start) -> None:
    folder = tmp_path / "traces"
    viewer = start("-m", "stagetrace", "view", "--follow", str(folder), "--name", "sched.*")
    assert "waiting for a trace" in viewer.stderr.readline()
    first = start("-c", WRITER, str(folder), "APIServer")
    say(first, "one")
    assert any("APIServer" in line for line in until(viewer, "one"))
    second = start("-c", WRITER, str(folder), "EngineCore_DP0")
    say(second, "two")
    assert any("EngineCore_DP0" in line for line in until(viewer, "two"))
    say(first, "three")
    until(viewer, "three")
    first.communicate()
    say(second, "four")
    until(viewer, "four")
    second.communicate()
    out, err = viewer.communicate()
    assert (out, err, viewer.returncode) == ("", "", 0)


def test_ctrl_c_and_limit_end_it(tmp_path: Path, start) -> None:
    writer = start("-c", WRITER, str(tmp_path), "APIServer")
    viewer = start("-m", "stagetrace", "view", "--follow", str(tmp_path))
    limited = start("-m", "stagetrace", "view", "--follow", str(tmp_path), "--limit", "2")
    say(writer, "one")
    until(viewer, "one")
    viewer.send_signal(signal.SIGINT)
    assert (
        viewer.communicate()[1].replace(f"waiting for a trace in {tmp_path} ...\n", "") == ""
        and viewer.returncode == 130
    )
    until(limited, "one")
    assert limited.wait() == 0


@given(st.integers(0, 2**32), st.sampled_from([3, 50, 20_000]))
def test_every_event_once_however_it_is_written(seed: int, max_held: int) -> None:
    """Bytes arrive in pieces of any size, files are renamed under the reader, much may have been written before."""
    rng = random.Random(seed)
    lanes = [
        [
            Event(1, seq, rng.randrange(100) + seq * 10, pid, "P", "i", "cli.main", 1, "x:1")
            for seq in range(rng.randrange(1, 60))
        ]
        for pid in range(rng.randrange(1, 4))
    ]
    for lane in lanes[1:]:
        for event in rng.sample(lane, len(lane) // 4):
            event.cause = f"0:{min(event.seq, len(lanes[0]) - 1)}"
    left = {pid: b"".join(map(encode_line, lane)) for pid, lane in enumerate(lanes)}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)

        def write_more(seconds: float = 0) -> None:
            for pid, data in left.items():
                size = rng.choice([0, 1, 40, 200, 5000])
                with open(folder / f"P-{pid}.jsonl", "ab") as file:
                    file.write(data[:size])
                left[pid] = data[size:]
                if rng.random() < 0.1 and size and data[:size].endswith(b"\n"):
                    (folder / f"P-{pid}.jsonl").replace(folder / f"P-{pid}.1.jsonl")

        patch.setattr("stagetrace.read.follow.SETTLE_SECONDS", 0)
        patch.setattr("stagetrace.read.follow.MAX_HELD", max_held)
        patch.setattr("stagetrace.read.follow._is_alive", lambda pid: any(left.values()))
        write_more()
        events = list(Follower(folder, sleep=write_more))
    for pid, lane in enumerate(lanes):
        assert [event for event in events if event.pid == pid] == lane
