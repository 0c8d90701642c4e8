"""The trace of `serve` under both its names, against the walk of the first description (notebooks/MAP.md), and against the
recorded run of the same request: is it older than the code?"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest
from server_under_test import ServerProcess

from stagetrace import VOCABULARY, Event, Run, read_run
from stagetrace.ids import root_of

ROOT = Path(__file__).parents[2]
MAP = ROOT / "notebooks/MAP.md"
FLAGS = ("--num-gpu-blocks-override", "64", "--prefix-caching-hash-seed", "recorded", "--trace-prompts")  # of record.py
CHAT = {
    "messages": [{"role": "user", "content": "To be"}],
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "stream": True,
}
RECORDED = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
DEEP = {name for name, row in VOCABULARY.items() if "--trace-layers" in row.meaning} | {
    "kv_cache.prefault"
}  # whenever a core is idle


@pytest.fixture(scope="module", params=["stage01_cli.main", "stage02_server.__main__"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A chat, then the request of the recorded run, then one that is not streamed; by `stages serve`, or by stage 2."""
    folder = tmp_path_factory.mktemp("traces")
    where = ("--host", "127.0.0.1", "--port", "0", "--trace", str(folder), "--trace-layers")
    server = ServerProcess("gpt2-tiny", *where, *FLAGS, command=request.param)
    try:
        url = server.wait_until_ready()
        with httpx.Client(base_url=url, timeout=None, trust_env=False) as client:
            assert client.post("/v1/chat/completions", json=CHAT).text.endswith("data: [DONE]\n\n")
            headers = {"X-Request-Id": "r0"}
            assert client.post("/v1/completions", json=RECORDED, headers=headers).text.endswith("data: [DONE]\n\n")
            assert client.post("/v1/completions", json={"prompt": "O", "max_tokens": 1}).status_code == 200
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.close()
    yield read_run(folder)


def test_a_request_leaves_a_trace_through_all_nine_phases(run: Run) -> None:
    emitted = {event.name for event in run.events}
    assert emitted <= VOCABULARY.keys()
    assert {row.name for row in VOCABULARY.values() if row.main_path} <= emitted
    assert len(run.run_ids) == 1 and {e.proc for e in run.events} == {"APIServer", "EngineCore_DP0"}
    first: dict[int, str] = {}
    for event in run.events:
        first.setdefault(event.phase, event.name)
    assert [phase for phase in first if phase] == list(range(1, 10))
    [request_id] = [e.req for e in run.named("sched.queued") if "r0" in (e.req or "")]
    story = [e.name for e in run.of_request(request_id or "")]
    assert story.index("request.sampling_params") < story.index("request.tokenized") < story.index("zmq.request_sent")
    assert story.index("zmq.request_sent") < story.index("zmq.request_received") < story.index("sched.admit")
    assert story.count("sched.token") == 8 == story.count("sched.scheduled")
    assert story.count("sched.finished") == story.count("request.finished") == 1
    sent = {e.ref for e in run.named("zmq.request_sent")}
    assert {e.cause for e in run.named("zmq.request_received")} == sent


class Line:
    """A row of the map: a line of the description, the events that stand for it, and why they stand elsewhere."""

    def __init__(self, cells: list[str]) -> None:
        self.section, self.text, events, self.why = cells
        self.events = re.findall(r"`([^`]+)`", events)

    def place(self, run: Run) -> int:
        """Where the first of its events stands first in the run."""
        return min(next(i for i, e in enumerate(run.events) if says(e)) for says in map(matcher, self.events))


def matcher(words: str) -> Callable[[Event], bool]:
    """`executor.execute end` or `generate.yield number=1`: is it this event? A span without a word is its beginning."""
    name, *more = words.split()
    ph = {"begin": "B", "end": "E"}
    kinds = [ph[word] for word in more if word in ph] or ["i", "B"]
    pairs = [word.split("=") for word in more if "=" in word]
    return lambda e: e.name == name and e.ph in kinds and all(str(e.args[key]) == value for key, value in pairs)


def lines() -> list[Line]:
    """The rows of the map's table of `[TRACE]` lines."""
    table = MAP.read_text(encoding="utf-8").partition("## The `[TRACE]` lines")[2]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if row.startswith("|")]
    return [Line(cells) for cells in rows[2:]]


def test_the_map_names_an_event_for_every_line_of_the_description() -> None:
    count = {section: len(list(group)) for section, group in groupby(lines(), lambda line: line.section)}
    assert count == {
        "1.2": 4, "2.1": 4, "3.1": 4, "3.2": 2, "3.3": 4, "4.1": 16, "5.1": 2, "5.2": 7, "6.2": 2, "6.3": 9, "7.1": 6, "7.2": 9,
        "8.1": 8, "8.2": 16, "9.1": 6,
    }, "121 lines in the description, of which 25 are a sample that repeats the others but for two"  # fmt: skip
    for line in lines():
        assert {words.split()[0] for words in line.events} <= VOCABULARY.keys(), line.text
        assert line.events or line.why, f"{line.text}: neither an event nor a reason"


def test_the_walk_of_the_description_is_the_order_of_the_events(run: Run) -> None:
    """Section by section; a line that the map places elsewhere does stand elsewhere."""
    for section, group in groupby((line for line in lines() if line.events), lambda line: line.section):
        walk = list(group)
        places = [line.place(run) for line in walk]
        usual = [place for line, place in zip(walk, places) if not line.why]
        assert usual == sorted(usual), f"section {section}: {[line.text for line in walk if not line.why]} at {usual}"
        for i, (line, place) in enumerate(zip(walk, places)):
            if line.why:
                before = [p for other, p in zip(walk[:i], places) if not other.why]
                after = [p for other, p in zip(walk[i:], places[i:]) if not other.why]
                moved = {"earlier": before and place < before[-1], "later": after and place > after[0]}
                assert moved[line.why.partition(":")[0]], f"{line.text}: its event is where the description has it"


def kinds(events: list[Event]) -> set[tuple[str, str, str, tuple[str, ...], str]]:
    """What a reader of these events sees: which process says what, with which arguments, in which file."""
    return {(e.proc, e.ph, e.name, tuple(sorted(e.args)), e.src.partition(":")[0]) for e in events}


def test_the_recorded_run_of_this_request_is_not_older_than_the_code(run: Run) -> None:
    """If it is: `make recordings`. Times and numbers differ, but not which events there are, and in which order."""
    if "stages" not in run.named("cli.parser_created")[0].args["program"]:
        pytest.skip("the recorded runs are made with `stages serve`")
    recorded = read_run(ROOT / "trace/recorded/one_request").events
    own = [e for e in run.events if e.req is None or root_of(e.req).startswith("cmpl-r0-")]
    fresh = [e for e in own if e.name not in DEEP]
    assert kinds(recorded) == kinds(fresh)

    def walk(events: list[Event]) -> list[tuple[str, str]]:
        """The engine's phase 8, from the request's arrival to its end."""
        names = [(e.name, e.ph) for e in events if e.phase == 8 and e.proc == "EngineCore_DP0"]
        start, end = names.index(("sched.queued", "i")), names.index(("sched.finished", "i"))
        return names[start:end]

    first = next(i for i, e in enumerate(fresh) if e.name == "sched.queued")
    assert walk(recorded) == walk(fresh[first:])
