"""Files and console of the recorder: whole lines, in order, nothing lost; rotation; what a crash may cost."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from stagetrace import Event, Recorder, read_run, writer
from stagetrace.event import decode_line
from stagetrace.read.reader import REORDER_WINDOW

_EMITTERS = """if True:
    import sys, threading
    from stagetrace import trace
    name, folder = sys.argv[1], sys.argv[2]
    trace.hold(name)
    trace.open(None if folder == "-" else folder, console=folder == "-")
    def emit(thread):
        for i in range(200):
            trace.emit("sched.queued", req=f"t{thread}", step=i, text="#" * (i * 40 % 5000), line="a\\nb")
    threads = [threading.Thread(target=emit, args=(t,)) for t in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    trace.close()
"""


def test_the_console_lines_of_two_processes_with_many_threads_are_whole_and_in_order() -> None:
    read, write = os.pipe()
    processes = [
        subprocess.Popen([sys.executable, "-c", _EMITTERS, name, "-"], stderr=write)
        for name in ("APIServer", "EngineCore_DP0")
    ]
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    assert [process.wait() for process in processes] == [0, 0]
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in lines:
        assert len(line) < writer.CONSOLE_BYTES
        process, rest = line[:14], line[14:]
        assert process.rstrip() in ("APIServer", "EngineCore_DP0") and line.count("[TRACE]") == 1, line
        if "run.start" not in line:
            head, name, request, step, text, *_ = rest.partition(" [TRACE] ")[2].split(" ")
            assert (head, name) == ("(<string>)", "sched.queued") and text.startswith("text=")
            number = int(step.removeprefix("step="))
            assert text.count("#") == number * 40 % 5000 or (rest.endswith("...") and number * 40 % 5000 > 3900)
            seen[process, request].append(number)
    assert len(seen) == 16 and all(steps == list(range(200)) for steps in seen.values())


def test_the_file_of_many_threads_holds_every_event_nearly_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _EMITTERS, "X", str(tmp_path)], stderr=subprocess.DEVNULL, check=True)
    [file] = tmp_path.glob("*.jsonl")
    events = [decode_line(line) for line in file.read_bytes().splitlines()]
    assert sorted(e.seq for e in events) == list(range(1601))
    assert all(abs(e.seq - line) < REORDER_WINDOW for line, e in enumerate(events))
    assert [e.seq for e in read_run(tmp_path).events] == list(range(1601))
    for thread in range(8):
        assert [e.step for e in events if e.req == f"t{thread}"] == list(range(200))


@given(st.lists(st.integers(0, 90_000), max_size=40), st.integers(1 << 16, 1 << 18), st.booleans())
def test_rotation_keeps_the_newest_events_within_the_limit(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, flush: bool
) -> None:
    folder = tmp_path_factory.mktemp("rotation")
    recorder = Recorder()
    recorder.hold("EngineCore_DP0")
    recorder.open(str(folder), max_bytes=limit)
    for number, size in enumerate(sizes):
        recorder.emit("sched.queued", step=number, text="x" * size)
        if flush:
            recorder.flush()
    recorder.close()
    files = sorted(folder.glob("*.jsonl"), key=lambda path: path.name.count("."), reverse=True)
    assert (
        set(files) == set(folder.iterdir())
        and len(files) <= 2
        and files[-1].name == f"EngineCore_DP0-{os.getpid()}.jsonl"
    )
    assert sum(f.stat().st_size for f in files) <= limit or any(size > limit // 2 - 2000 for size in sizes)
    steps, parts = [], []
    for file in files:
        start, *events = [decode_line(line) for line in file.read_bytes().splitlines()]
        assert (start.name, start.seq) == ("run.start", 0) and start.args["run_id"] == recorder.run_id
        parts.append(start.args["part"])
        steps += [e.step for e in events]
    assert steps == list(range(len(sizes) - len(steps), len(sizes))) and (steps or not sizes)
    assert parts == list(range(parts[0], parts[0] + len(files))) and (parts[0] == 0) == (len(steps) == len(sizes))


_VICTIM = """if True:
    import os, signal, sys, time
    from stagetrace import trace
    trace.open(sys.argv[1])
    for i in range(1000):
        trace.emit("sched.queued", req="r", step=i)
    print("emitted", flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(3)", "raise RuntimeError", "trace.close(); os._exit(0)", "trace.flush(); os._exit(1)"]
)
def test_an_end_that_python_sees_loses_nothing(tmp_path: Path, end: str) -> None:
    code = _VICTIM.format(end=end)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True)
    assert [e.step for e in read_run(tmp_path).named("sched.queued")] == list(range(1000))


def test_kill_9_loses_what_came_last_and_no_more(tmp_path: Path) -> None:
    """The writer's thread has written what is older than its interval, though nothing was flushed."""
    code = _VICTIM.format(end="[sys.stdout.flush() for _ in iter(lambda: sys.stdin.readline(), '')]")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"emitted\n"
        [file] = tmp_path.glob("*.jsonl")
        while file.read_bytes().count(b"\n") < 1001:  # the test's own time limit ends this
            pass
        process.send_signal(signal.SIGKILL)
    assert len(read_run(tmp_path).named("sched.queued")) == 1000


def test_an_event_is_what_it_was_when_it_was_emitted(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.open(str(tmp_path))
    blocks = [1, 2]
    recorder.emit("kv.allocated", blocks=blocks)
    blocks.append(3)
    recorder.close()
    assert read_run(tmp_path).named("kv.allocated")[0].args == {"blocks": [1, 2]}


def test_a_full_disk_ends_the_recording_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    recorder.open(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(30_000):  # more than may wait
            recorder.emit("sched.queued", req="r")
        recorder.flush()
    recorder.emit("sched.queued", req="r")
    recorder.close()
    assert capfd.readouterr().err == "stages: the trace ends here: No space left on device\n"
    assert [e.name for e in read_run(tmp_path).events] == ["run.start"]


def test_a_console_that_is_gone_ends_nothing() -> None:
    code = """if True:
        import os
        from stagetrace import trace
        trace.open(None, console=True)
        os.close(2)
        trace.emit("sched.queued", req="r")
        print("on")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "on\n"


def test_a_filter_that_is_off_gives_every_event_its_number(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.hold("X")
    refs = [recorder.emit("engine.hello"), recorder.emit("cli.main")]
    recorder.open(str(tmp_path))
    lock = threading.Thread(target=lambda: refs.append(recorder.emit("cli.parsed")))
    lock.start()
    lock.join()
    recorder.close()
    events: list[Event] = list(read_run(tmp_path).events)
    assert [e.ref for e in events[1:]] == refs


def test_a_recording_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It may hold prompts. A folder that was there keeps its mode."""
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    for folder, mode in ((there, 0o755), (tmp_path / "new", 0o700)):
        recorder = Recorder()
        recorder.open(str(folder), max_bytes=writer.MIN_MAX_BYTES)
        for _ in range(3):
            for _ in range(8):
                recorder.emit("sched.queued", text="#" * 4000)
            recorder.flush()
        recorder.close()
        files = list(folder.iterdir())
        assert len(files) == 2, "one was rotated"
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == mode
