"""The figures' data and tables against plain records of what was true: invented runs in any shape, and the recorded ones."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from invented_run import InventedRun, invent

from stagetrace import Recording, Story, figures, read_run, tell
from stagetrace.__main__ import main
from stagetrace.errors import TraceError
from stagetrace.figures import blocks, breakdown, budget, lanes, paging, timeline
from stagetrace.figures.names import ranges, short_names

RECORDED = Path(__file__).parent.parent.parent / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir())
# a figure shows one: test_several_processes.py has the others
ONE_ENGINE = [name for name in RUNS if not name.startswith(("dp2", "nodes2"))]
NAMES = ["request_timeline", "process_lanes", "block_map", "token_budget", "latency_breakdown"]

invented_runs = st.builds(
    invent, st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 12), st.sampled_from([3, 8, 24])
)


def grid(story: Story) -> list[dict[int, set[str]]]:
    """Per step: block -> holders, free but cached blocks with none; from the stretches of the map."""
    columns: list[dict[int, set[str]]] = [{} for _ in story.steps]
    for stretch in blocks.stretches(story):
        for column in range(stretch.first, stretch.last + 1):
            assert stretch.block not in columns[column], "a block in two stretches at once"
            columns[column][stretch.block] = set(stretch.holders)
    return columns


def true_grid(run: InventedRun) -> list[dict[int, set[str]]]:
    return [{b: set() for b in found} | held for found, held in zip(run.findable, run.holders)]


@given(invented_runs)
def test_the_block_map_is_the_state_at_every_decision(run: InventedRun) -> None:
    assert grid(tell(run.events)) == true_grid(run)


def replayed(name: str) -> list[tuple[dict[int, set[str]], int]]:
    """Per decision of a recorded run: block -> holders (none: free but cached), and the free blocks of which it speaks."""
    held: dict[int, list[str]] = {}
    cached: set[int] = set()
    found = []
    for event in read_run(RECORDED / name).events:
        ids = event.args.get("blocks", [])
        if event.name in ("kv.allocated", "sched.prefix_hit"):
            for block in ids:
                held.setdefault(block, []).append(str(event.req))
        elif event.name == "kv.freed":
            for block in ids:
                held[block].remove(str(event.req))
        elif event.name == "kv.cached":
            cached |= set(ids)
        elif event.name == "kv.evicted":
            cached.remove(event.args["block"])
        elif event.name == "sched.output":
            state = {
                block: set(held.get(block, [])) for block in {*held, *cached} if held.get(block) or block in cached
            }
            found.append((state, event.args["free_blocks"]))
    return found


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_recorded_blocks_are_replayed_naively_and_counted_by_the_scheduler(name: str) -> None:
    story = tell(Recording(RECORDED / name))
    columns, expected = grid(story), replayed(name)
    assert columns == [state for state, _ in expected]
    usable = blocks.num_usable(story)
    held = [sum(bool(holders) for holders in column.values()) for column in columns]
    assert [usable - count for count in held] == [free for _, free in expected]


def test_recorded_runs_share_evict_and_hit() -> None:
    """The recordings exercise what the comparison above is about."""
    kinds = Counter(change.name for name in RUNS for change in tell(Recording(RECORDED / name)).blocks)
    assert all(kinds[name] for name in ("kv.allocated", "kv.freed", "kv.cached", "kv.evicted", "sched.prefix_hit"))


@given(invented_runs)
def test_joined_boxes_cover_the_same_blocks(run: InventedRun) -> None:
    map_ = blocks.stretches(tell(run.events))
    one_by_one = Counter((s.block, c, s.holders) for s in map_ for c in range(s.first, s.last + 1))
    joined: Counter[tuple[int, int, tuple[str, ...]]] = Counter()
    for (x, y, width, height), holders in blocks.join(map_):
        for block in range(round(y + 0.5), round(y + 0.5 + height)):
            joined.update((block, column, holders) for column in range(round(x + 0.5), round(x + 0.5 + width)))
    assert joined == one_by_one


@given(invented_runs)
def test_the_block_table_says_the_same(run: InventedRun) -> None:
    story = tell(run.events)
    names = short_names(story.requests)
    lines = {int(line.split()[0]): line for line in figures.block_map_table(story).splitlines()[1:]}
    line = None
    for column, (held, found) in enumerate(zip(run.holders, run.findable)):
        line = lines.get(column + 1, line)  # a step without a line is like the one before
        if line is None:
            assert not held and not found
            continue
        of: dict[str, list[int]] = {}
        for block, holders in held.items():
            for holder in holders:
                of.setdefault(names[holder], []).append(block)
        assert {(who, where) for who, where in re.findall(r"(\S+): ([\d\- ]*\d)", line)} == {
            (n, ranges(b)) for n, b in of.items()
        }
        free, cached, shared = map(int, line.split()[1:4])
        assert (free, cached) == (run.num_blocks - 1 - len(held), len(found - held.keys()))
        assert shared == sum(len(holders) > 1 for holders in held.values())


@given(invented_runs)
def test_the_timeline_is_what_every_request_did(run: InventedRun) -> None:
    story = tell(run.events)
    kinds: list[dict[str, str]] = [{} for _ in run.kinds]
    tokens: list[dict[str, int]] = [{} for _ in run.kinds]
    for request in timeline.in_engine(story):
        for stretch in timeline.stretches(story, request):
            for column in range(stretch.first, stretch.last + 1):
                kinds[column][request.request_id] = stretch.kind
            for column, chunk in enumerate(stretch.chunks, start=stretch.first):
                tokens[column][request.request_id] = chunk
    assert kinds == run.kinds and tokens == run.tokens


@given(invented_runs)
def test_the_timeline_table_has_every_step_of_every_request(run: InventedRun) -> None:
    story = tell(run.events)
    names = short_names(story.requests)
    expected = Counter(
        (names[i], kind, step) for step, kinds in enumerate(run.kinds, start=1) for i, kind in kinds.items()
    )
    found: Counter[tuple[str, str, int]] = Counter()
    tokens = 0
    head, *lines = figures.request_timeline_table(story).splitlines()
    for line in lines:
        name, kind, first, last = (
            line[: head.index("tokens")].replace("no tokens", "no_tokens").replace("no step", "no_step 1 0")
        ).split()[:4]
        found.update((name, kind.replace("_", " "), step) for step in range(int(first), int(last) + 1))
        tokens += sum(map(int, re.findall(r"\d+", line[head.index("tokens") : head.index("from cache")])))
    assert found == expected
    assert tokens == sum(sum(step.values()) for step in run.tokens)
    assert sum("recording ends" in line for line in lines) == len(run.guests)


@given(invented_runs)
def test_the_budget_is_shared_as_decided(run: InventedRun) -> None:
    story = tell(run.events)
    for step, shares, kinds, tokens, drafts in zip(
        story.steps, budget.shares(story), run.kinds, run.tokens, run.drafts
    ):
        assert sum(share.num_tokens for share in shares) == step.total_tokens
        assert {s.request_id: s.num_tokens for s in shares if s.kind == "drafts"} == drafts
        assert {s.request_id: (s.kind, s.num_tokens) for s in shares if s.kind != "drafts"} == {
            i: (kinds[i], n) for i, n in tokens.items()
        }
        assert [s.kind for s in shares] == sorted((s.kind for s in shares), key=budget.USES.index)
    rows = [list(map(int, line.split()[:5])) for line in figures.token_budget_table(story).splitlines()[1:]]
    assert [row[0] for row in rows] == list(range(1, len(run.kinds) + 1))
    assert all(sum(row[1:4]) == row[4] for row in rows)


@pytest.mark.parametrize("name", RUNS)
def test_recorded_budgets_add_up(name: str) -> None:
    story = tell(Recording(RECORDED / name))
    assert [sum(share.num_tokens for share in step) for step in budget.shares(story)] == [
        s.total_tokens for s in story.steps
    ]


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_the_lanes_have_all_messages_and_steps(name: str) -> None:
    events = read_run(RECORDED / name).events
    story = tell(events)
    shown = lanes.scene(story)
    sent = {event.ref: event.ts for event in events if event.name in lanes.ARROWS}
    received = [(sent[e.cause], e.ts) for e in events if e.name.startswith("zmq.") and e.cause in sent]
    assert sorted((m.sent_ns, m.received_ns) for m in shown.messages) == sorted(received)
    lines = figures.process_lanes_table(story).splitlines()
    assert sum(" -> " in line for line in lines) == len(received)
    assert sum(bool(re.search(r" step \d+ +[\d.]+$", line)) for line in lines) == sum(
        bool(step.end_ns) for step in story.steps
    )
    assert sum("sse.chunk" in line for line in lines) == sum(event.name == "sse.chunk" for event in events)
    times = [float(line.split()[0]) for line in lines[1:]]
    assert times == sorted(times) and times[0] >= 0


def test_the_lanes_of_one_request_leave_the_others_out() -> None:
    story = tell(Recording(RECORDED / "mixed"))
    shown = lanes.scene(story, "r5")
    (request,) = shown.requests
    assert request.request_id.startswith("cmpl-r5-")
    assert [step.step for step in shown.steps] == [
        step.step for step in story.steps if request.request_id in step.scheduled
    ]
    assert {message.req for message in shown.messages} == {request.request_id, None}
    assert lanes.scene(story, request.request_id) == shown
    table = figures.process_lanes_table(story, "r5")
    assert "r5 sse.chunk" in table and "r4" not in table
    with pytest.raises(TraceError, match="no request 'nobody' in this recording; there is r0"):
        lanes.scene(story, "nobody")


def test_an_abort_is_part_of_the_request_that_it_ends() -> None:
    story = tell(Recording(RECORDED / "client_abort"))
    assert "abort -> EngineCore" in figures.process_lanes_table(story, "r0")
    assert "abort" not in figures.process_lanes_table(story, "r1")


@pytest.mark.parametrize("name", RUNS)
def test_the_breakdown_adds_up_to_what_the_client_waited(name: str) -> None:
    events = read_run(RECORDED / name).events
    for latency in breakdown.answered(tell(events)):
        arrival = next(e.ts for e in events if e.name == "http.request" and e.req == latency.request_id)
        left = ("sse.chunk", "http.response")
        chunks = [e.ts for e in events if e.name in left and e.req == latency.request_id]
        assert latency.ttft_ns == chunks[0] - arrival
        total = sum(time for _, time in breakdown.pieces(latency))
        assert arrival + total in chunks and arrival + total == arrival + latency.ttft_ns + (latency.gaps_ns or 0)
    table = figures.latency_breakdown_table(tell(events)).splitlines()
    for line in table[1:]:
        whole, *parts = map(float, line.split()[3:])
        assert whole == pytest.approx(sum(parts), abs=0.002 + whole * 0.005)


def test_names_are_short_and_never_the_same() -> None:
    ids = ["cmpl-r0-b281c1bc-0", "cmpl-r1-b281c1bd-0", "0_cmpl-r2-0600a53c-0", "1_cmpl-r2-0600a53c-0"]
    assert list(short_names(ids).values()) == ["r0", "r1", "0_r2", "1_r2"]
    twice = ["cmpl-same-b281c1bc-0", "cmpl-same-b281c1bd-0"]
    assert list(short_names(twice).values()) == twice
    long = [f"cmpl-{'x' * 40}{i}-b281c1bc-0" for i in range(2)]
    assert list(short_names(long).values()) == ["x" * 40 + "0", "x" * 40 + "1"]


@pytest.mark.slow(keep="request_timeline")
@pytest.mark.parametrize("name", NAMES)
def test_the_command_prints_and_draws(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(RECORDED / "one_request")
    assert main(["figure", run, name]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == getattr(figures, f"{name}_table")(tell(Recording(run))).strip() and "r0" in printed
    for suffix, beginning in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        out = tmp_path / f"figure{suffix}"
        assert main(["figure", run, name, "--out", str(out)]) == 0
        assert out.read_bytes().startswith(beginning)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["block_map", "--out", "x.gif"], "--out x.gif: the name must end in .png, .svg, .pdf"),
        (["block_map", "--x", "time"], "--x says nothing about block_map"),
        (["process_lanes", "--req", "r9"], "no request 'r9' in this recording; there is r0"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figure", str(RECORDED / "one_request"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def paged(block_size: int = 4) -> paging.Moment:
    a = paging.Paged("a", [" to", "be", "\n", "or", "not"], 4, [3, 1][: -(-4 // block_size)])
    b = paging.Paged("b", [" to", "be", "\n", "or", "x", "y"], 5, [3, 2])
    return paging.Moment([a, b], block_size, 6, cached={3, 5}, new={2})


def test_paged_requests_say_where_each_token_lies() -> None:
    moment = paged()
    assert [moment.holders(block) for block in range(6)] == [[], [], [1], [0, 1], [], []]
    assert moment.look(3) == blocks.SHARED and moment.look(2) != moment.look(3)
    assert moment.look(5) == blocks.CACHED and moment.look(4) == blocks.FREE
    assert moment.slots(3) == [" to", "be", "\n", "or"] and moment.slots(2) == ["x"] and moment.slots(4) == []
    _, *lines = paging.paged_requests_table(moment).splitlines()
    assert [line.split()[:3] for line in lines] == [["a", "0", "3"], ["b", "0", "3"], ["b", "1", "2"]]
    assert "·to be \\n or" in lines[0] and lines[0].endswith("shared with b")
    assert lines[1].endswith("shared with a") and lines[2].split()[3:] == ["x", "3", "new"]


def test_paged_requests_are_drawn() -> None:
    figure = paging.paged_requests(paged(), "title")
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert "logical block 1  →  block 2" in texts and "2  new" in texts and "0  the null block" in texts
    assert texts.count("·to") == 3, "in both requests' tokens, and once in the pool"
    (legend,) = figure.legends
    assert {"a", "b", "shared", "free, still cached"} <= {text.get_text() for text in legend.get_texts()}
    for wrong in ([], [*paged().requests] * 2):
        with pytest.raises(ValueError, match="room for one or two"):
            paging.paged_requests(dataclasses.replace(paged(), requests=wrong))
