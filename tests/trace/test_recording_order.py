"""Recording reads a folder from the disk: every event comes out once, in an order that keeps causes and sequence numbers."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, strategies as st

from stagetrace import Event, Recording, read_run
from stagetrace.event import encode_line
from stagetrace.read.reader import REORDER_WINDOW


def event(pid: int, seq: int, ts: int, cause: str | None = None, name: str = "cli.main") -> Event:
    args = {"run_id": "r"} if name == "run.start" else {}
    return Event(1, seq, ts, pid, f"P{pid}", "i", name, 1, "x:1", cause=cause, args=args)


@st.composite
def processes(draw: st.DrawFn, contradictory: bool = False) -> list[list[Event]]:
    """Processes whose events name causes in each other: recorded, lost or (contradictory) of the future."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 4))
    offsets = [draw(st.sampled_from([0, 0, 500, -500, 10**6])) for _ in range(count)]
    lanes: list[list[Event]] = [[event(pid, 0, offset, name="run.start")] for pid, offset in enumerate(offsets)]
    size = draw(st.integers(0, 700))
    for now in range(size):
        pid = rng.randrange(count)
        other = rng.randrange(count)
        choice = rng.random()
        cause = None
        if choice < 0.2 and lanes[other]:
            cause = rng.choice(lanes[other]).ref
        elif choice < 0.25:
            unrecorded = f"{other}:{rng.choice(lanes[other]).seq - 1}"  # if a filter left out the one before
            cause = rng.choice([unrecorded, "99:5", "?", "1:x", ":", "-1:-1", "²:1"])
        elif contradictory and choice < 0.5:
            cause = f"{other}:{rng.randrange(size)}"
        seq = lanes[pid][-1].seq + rng.choice([1, 1, 1, 3])  # a filter leaves gaps
        lanes[pid].append(event(pid, seq, now + offsets[pid] + rng.randrange(-5, 5), cause))
    # crashes lose the end
    return [lane[: rng.randrange(1, len(lane) + 1)] if rng.random() < 0.3 else lane for lane in lanes]


def shuffled(lane: list[Event], rng: random.Random) -> list[Event]:
    """As threads may write them: nobody is overtaken by more events than the window holds."""
    keys = [i + rng.uniform(0, REORDER_WINDOW / 2) for i in range(len(lane))]
    return lane[:1] + [lane[i] for i in sorted(range(1, len(lane)), key=lambda i: keys[i])]


def write(folder: Path, lanes: list[list[Event]], rng: random.Random, torn: bool = False) -> tuple[Counter[str], int]:
    """Write each process to one, two or three files (rotation); returns what must come out, and how many lines are torn."""
    expected: Counter[str] = Counter()
    num_torn = 0
    for pid, lane in enumerate(lanes):
        events = shuffled(lane, rng)
        cut = rng.randrange(1, len(events) + 1) if rng.random() < 0.5 else len(events)
        parts = [events[:cut]] + ([[events[0], *events[cut:]]] if cut < len(events) else [])
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            data = b"".join(map(encode_line, part))
            if torn and last and len(part) > 1 and rng.random() < 0.7:
                data = data[: -rng.randrange(2, len(encode_line(part[-1])))]
                part = part[:-1]
                num_torn += 1
            expected.update(encode_line(one).decode() for one in part)
            (folder / (f"P{pid}-{pid}.jsonl" if last else f"P{pid}-{pid}.1.jsonl")).write_bytes(data)
    return expected, num_torn


def check_sequence(events: list[Event]) -> None:
    highest: dict[int, int] = {}
    for one in events:
        if one.seq:  # 0 is the first record of each file
            assert one.seq > highest.get(one.pid, -1)
            highest[one.pid] = one.seq


@given(processes(), st.integers(0, 2**32), st.booleans())
def test_all_come_out_once_and_after_their_causes(lanes: list[list[Event]], seed: int, torn: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected, num_torn = write(Path(folder), lanes, random.Random(seed), torn)
        recording = Recording(folder)
        events = list(recording)
        assert recording.torn == num_torn
        assert list(recording) == events and recording.torn == num_torn  # as often as one likes
        assert read_run(folder).events == events
    assert Counter(encode_line(one).decode() for one in events) == expected
    check_sequence(events)
    recorded = {one.ref for one in events if one.seq}
    place = {one.ref: i for i, one in enumerate(events) if one.seq}
    for i, one in enumerate(events):
        assert one.cause not in recorded or place[one.cause] < i


@given(processes(contradictory=True), st.integers(0, 2**32))
def test_contradictory_causes_lose_nothing(lanes: list[list[Event]], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected, _ = write(Path(folder), lanes, random.Random(seed))
        events = list(Recording(folder))
    assert Counter(encode_line(one).decode() for one in events) == expected
    check_sequence(events)


@given(processes(), st.integers(0, 2**32))
def test_without_causes_and_clock_trouble_it_is_the_order_of_time(lanes: list[list[Event]], seed: int) -> None:
    lanes = [[event(one.pid, one.seq, i * 7 + one.pid) for i, one in enumerate(lane)] for lane in lanes]
    with tempfile.TemporaryDirectory() as folder:
        for lane in lanes:
            (Path(folder) / f"P{lane[0].pid}-{lane[0].pid}.jsonl").write_bytes(
                b"".join(map(encode_line, shuffled(lane, random.Random(seed))))
            )
        recording = Recording(folder)
        events = list(recording)
        assert recording.start_ns() == min((one.ts for one in events), default=0)
        assert recording.processes() == {lane[0].pid: lane[0].proc for lane in lanes}
    assert [one.ts for one in events] == sorted(one.ts for lane in lanes for one in lane)


def test_the_first_record_of_a_later_file_stays_between_the_files(tmp_path: Path) -> None:
    lane = [event(1, seq, seq) for seq in range(2000)]
    (tmp_path / "P-1.1.jsonl").write_bytes(b"".join(map(encode_line, lane[:1000])))
    (tmp_path / "P-1.jsonl").write_bytes(b"".join(map(encode_line, [lane[0], *lane[1000:]])))
    assert [one.seq for one in Recording(tmp_path)] == [*range(1000), 0, *range(1000, 2000)]


def test_a_torn_line_is_forgiven_at_the_end_of_a_file_only(tmp_path: Path) -> None:
    lines = [encode_line(event(1, seq, seq)) for seq in range(5)]
    file = tmp_path / "P-1.jsonl"
    file.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    assert len(list(Recording(tmp_path))) == 3
    file.write_bytes(b"".join(lines[:3]) + lines[3][:9] + b"\n" + lines[4])
    try:
        list(Recording(tmp_path))
    except ValueError as error:
        assert f"{file}:4: not a trace event" in str(error)
    else:
        raise AssertionError("a foreign line in the middle was accepted")
