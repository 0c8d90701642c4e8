"""The HTML player in a real browser: it steps, what it shows is what the recording says, and it loads nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from invented_run import InventedRun
from naive_replay import on_the_way, state_after
from patience import PATIENCE, wait_until

from stagetrace import Event, Recording, Run, read_run
from stagetrace.__main__ import main
from stagetrace.check.difference import StepFacts, compare
from stagetrace.errors import TraceError
from stagetrace.figures.style import KINDS, request_look
from stagetrace.player import data, page, show
from stagetrace.player.build import lean
from stagetrace.player.data import page_data, short_names
from stagetrace.player.places import WALK

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())

READ_STATE = """([engine, positions]) => positions.map(position => {
  const slider = document.getElementById("slider"), all = document.querySelector(".run"), run = all.querySelectorAll(".core")[engine];
  slider.value = position;
  for (const type of ["input", "change"]) slider.dispatchEvent(new Event(type));
  const ids = selector => [...run.querySelectorAll(selector + " > li[data-request]")].map(li => li.dataset.id);
  const map = player.panels[0].engines[engine].blocks, places = [...map.looks.keys()];
  return {
    event: all.querySelector(".event-name").textContent,
    listed: all.querySelector(".list [aria-current] .name").textContent,
    phase: all.querySelector(".phases [aria-current]")?.dataset.phase ?? "0",
    running: ids(".rows"),
    waiting: ids(".waiting ol"),
    lacks: [...run.querySelectorAll(".waiting ol > li[data-request]")].map(li => Number(li.textContent.match(/lacks (\\d+)$/)[1])),
    tokens: [...run.querySelectorAll(".rows li[data-request]")].map(li => ["computed", "chunk", "drafts", "total"].map(kind => Number(li.dataset[kind]))),
    holders: Object.fromEntries(places.map(id => [id, map.holders(id).join(" ")]).filter(([, names]) => names)),
    cached: places.filter(id => map.isCached(id)),
    free: Number(run.querySelector(".blocks").dataset.free),
    used: Number(run.querySelector(".budget").dataset.used),
    messages: [...all.querySelectorAll(".zmq .pill:not(.arrives)")].map(pill => Number(pill.dataset.sent)),
    heldBack: run.querySelector(".held-back").textContent,
  };
})"""


class Opened:
    """A window of the browser, and all that went wrong on it."""

    def __init__(self, browser: Any) -> None:
        self.context = browser.new_context()
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def load(self, path: Path, text: str, link: str = "", **media: str) -> None:
        self.page.set_viewport_size({"width": 1400, "height": 1000})
        self.page.emulate_media(**{"color_scheme": "light", "reduced_motion": "no-preference"} | media)
        self.page.goto("about:blank")
        file = path / "player.html"
        file.write_text(text, encoding="utf-8")
        self.page.goto(file.as_uri() + link)
        self.page.wait_for_function(
            "typeof player === 'undefined' || player !== null"
        )  # another page may hold it in a frame

    def read(self, *positions: int, engine: int = 0) -> list[dict[str, Any]]:
        """What the page shows at these positions of the slider, of one engine in the order of their names."""
        shown: list[dict[str, Any]] = self.page.evaluate(READ_STATE, [engine, list(positions)])
        return shown

    def at(self, run: int = 0) -> int:
        """The place of the current event."""
        return int(self.page.locator(".run").nth(run).get_attribute("data-at"))

    def press(self, *keys: str) -> int:
        for key in keys:
            self.page.keyboard.press(key)
        return self.at()

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.text_content())


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Opened]:
    one = Opened(browser)
    yield one
    one.context.close()


@pytest.fixture
def opened(window: Opened, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a page in the window, as a window for each would cost as much again; whatever it opened must have been
    silent and alone."""

    def open_page(*recordings: Any, link: str = "", **media: str) -> Opened:
        window.load(tmp_path, page(*recordings), link, **media)
        return window

    yield open_page
    assert window.errors == []
    assert [url for url in window.requests if not url.startswith(("file:", "data:", "about:blank"))] == []
    window.page.goto("about:blank")  # it may still play


def check_state(
    shown: dict[str, Any], events: list[Event], labels: dict[str, str], received: set[str], overtakes: bool, engine: int
) -> None:
    """What the page shows after `events` is what the naive replay finds of an engine (its pid); `overtakes`: they do not wait in order
    of arrival."""
    event, naive = events[-1], state_after([e for e in events if e.pid == engine])
    assert shown["event"].startswith(event.name) and shown["listed"].startswith(event.name)
    assert (labels[event.req] in shown["event"]) if event.req else True
    assert shown["phase"] == str(event.phase)
    assert shown["running"] == naive["running"] and set(shown["waiting"]) == set(naive["waiting"])
    assert shown["lacks"] == [naive["lacks"][request_id] for request_id in shown["waiting"]]
    if event.name == "sched.held_back" and event.pid == engine:
        # the scheduler's own order, which a class of the user's may choose
        assert shown["waiting"] == [*event.args["held"], event.args["first"], *event.args["behind"]]
    elif not overtakes:
        assert shown["waiting"] == naive["waiting"]
    assert shown["tokens"] == [list(naive["tokens"][request_id]) for request_id in naive["running"]]
    assert shown["holders"] == {str(b): " ".join(labels[r] for r in who) for b, who in naive["holders"].items()}
    assert set(shown["cached"]) == naive["cached"]
    assert (shown["free"], shown["used"]) == (naive["free"], naive["used"])
    if event.name == "sched.output" and event.pid == engine:  # what the scheduler itself said
        assert (shown["free"], shown["used"]) == (event.args["free_blocks"], event.args["total_tokens"])
    sent = [i for i in on_the_way(events) if events[i].ref in received or i == len(events) - 1]
    assert shown["messages"] == sent[-4:]


@pytest.mark.slow(keep="preemption")
@pytest.mark.parametrize("name", RUNS)
def test_what_it_shows_is_what_the_recording_says(opened: Any, name: str) -> None:
    events = read_run(RECORDED / name).events
    telling = ("sched.output", "sched.preempt", "sched.held_back", "spec.verified", "engine.step")
    often = [i for i, e in enumerate(events) if e.name in telling]
    chance = random.Random(name)
    places = {0, *chance.sample(range(len(events)), 20), *chance.sample(often, min(20, len(often)))}
    order = chance.sample(sorted(places), len(places))  # forward and back
    order += [i for i in (len(events) - 1, 256, 255, 254) if i < len(events)]  # the page keeps a state every 256 events
    labels = dict(short_names(dict.fromkeys(e.req for e in events if e.req)))
    received = {e.cause for e in events if e.cause}
    names = {e.pid: e.proc for e in events}
    engines = sorted({e.pid for e in events if e.name == "scheduler.created"}, key=lambda pid: (names[pid], pid))
    player = opened(RECORDED / name)
    for number, engine in enumerate(engines):
        for place, shown in zip(order, player.read(*order, engine=number)):
            lost = {f"EngineCore_DP{e.args['engine']}" for e in events[: place + 1] if e.name == "dp.engine_lost"}
            if names[engine] in lost and engine == min(pid for pid in engines if names[pid] == names[engine]):
                assert shown["running"] == shown["waiting"] == [] and not shown["holders"], "the dead have nothing"
            else:
                check_state(shown, events[: place + 1], labels, received, name == "bug_starvation", engine)


def test_what_is_drawn_in_parts_is_what_is_drawn_as_a_whole(opened: Any) -> None:
    """The block map and the rows draw only what changed: after jumps in any direction the picture is that of a page drawn at once."""
    events = read_run(RECORDED / "preemption").events
    chance = random.Random(5)
    order = [chance.randrange(len(events)) for _ in range(6)] + [600, 601, 602, 601]
    player = opened(RECORDED / "preemption")
    picture = """() => player.panels[0].engines.map(({blocks}) => blocks.surface.canvas.toDataURL()).concat(
      player.panels[0].timeline.surface.canvas.toDataURL(), document.querySelector(".run").outerHTML.replace(/ style="[^"]*"/g, ""))"""
    player.page.evaluate(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )  # it is as wide as it will be
    for place in order:
        player.read(place)
        in_parts = player.page.evaluate(picture)
        player.page.evaluate("player.panels[0].engines.forEach(({blocks}) => blocks.surface.resize(true))")
        assert player.page.evaluate(picture) == in_parts, place
    held = int(next(iter(player.read(600)[0]["holders"])))
    middles = """ids => { const map = player.panels[0].engines[0].blocks, { canvas, context } = map.surface;
      const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
      const at = id => ((Math.floor(id / map.columns) * 31 + 12) * canvas.width + (id % map.columns) * (map.wide + 3) + 8) * 4;
      return ids.map(id => [...data.slice(at(id), at(id) + 3)]); }"""
    held_colour, padding = player.page.evaluate(middles, [held, 0])
    assert held_colour != padding, "a block that is held has the colour of who holds it"


def test_every_lane_and_what_crosses_between_them(opened: Any) -> None:
    """Two workers: each is a lane that says which collective it is in, and the wire to them shows a step on its way."""
    events = read_run(RECORDED / "tp2").events
    player = opened(RECORDED / "tp2")
    lanes = player.page.locator(".workers .lane h2").all_text_contents()
    assert sorted(lanes) == ["Worker_TP0", "Worker_TP1"] and player.page.locator(".core").count() == 1
    inside = next(i for i, e in enumerate(events) if e.name == "worker.collective" and e.step == 3 and e.ph == "B")
    player.read(inside)
    lane = player.page.locator(".workers .lane.acting")
    assert lane.locator("h2").text_content() == events[inside].proc
    assert (
        lane.locator(".inside").text_content()
        == f"model.forward, step 3 › all_reduce of {events[inside].args['bytes']} bytes"
    )
    sent = next(i for i, e in enumerate(events) if e.name == "executor.step_sent" and e.step == 3)
    player.read(sent)
    assert player.text(".wire.steps .messages") == "step 3 → 2 workers"
    got = next(i for i, e in enumerate(events) if e.cause == events[sent].ref)
    player.read(got)
    assert player.text(".wire.steps .messages") == f"step 3 → {events[got].proc} ✓"
    assert "executor.step_sent in EngineCore_DP0" in player.text(".event .facts")


@pytest.mark.slow
def test_two_engines_are_two_schedulers(opened: Any) -> None:
    events = read_run(RECORDED / "dp2_death").events
    player = opened(RECORDED / "dp2_death")
    created = sorted((e.proc, e.pid) for e in events if e.name == "scheduler.created")
    again = [f"{name} ({pid})" if name == "EngineCore_DP0" else name for name, pid in created]
    assert sorted(player.page.locator(".whose").all_text_contents()) == again and len(again) == 3
    lost = next(i for i, e in enumerate(events) if e.name == "dp.engine_lost")
    player.read(lost)
    dead = [text for text in player.page.locator(".engines .lane").all_text_contents() if "×" in text]
    assert len(dead) == 1 and "EngineCore_DP0" in dead[0]
    steps = [i for i, e in enumerate(events) if e.name == "sched.output"]
    for place in steps[:: len(steps) // 5]:
        player.read(place)
        assert f"engine step {events[place].step} of {events[place].proc} " in player.text(".run-when")
    player.press("Home")
    assert player.press("Shift+ArrowRight", "Shift+ArrowRight") == steps[1], "a step of either engine"


def test_it_opens_where_something_happens_and_its_address_leads_back(opened: Any) -> None:
    events = read_run(RECORDED / "mixed").events
    first = next(i for i, e in enumerate(events) if e.name == "sched.scheduled")
    player = opened(RECORDED / "mixed")
    assert player.at() == first and player.page.locator(".start-up").is_visible()
    player.press("ArrowRight", "ArrowRight")
    player.page.wait_for_url(f"**#e={first + 3}")
    player.page.reload()
    player.page.wait_for_function("player !== null")
    assert player.at() == first + 2
    decided = next(i for i, e in enumerate(events) if e.name == "sched.output" and e.step == 7)
    assert opened(RECORDED / "mixed", link="#step=7").at() == decided
    third = opened(RECORDED / "mixed", link="#req=r3")
    scheduled = next(i for i, e in enumerate(events) if e.name == "sched.scheduled" and "-r3-" in e.req)
    assert third.at() == scheduled and third.page.locator("#filter").input_value() == "r3"
    third.page.wait_for_url(f"**#e={scheduled + 1}&req=r3")
    third.page.evaluate("location.hash = '#e=100'")
    third.page.wait_for_function("document.querySelector('.run').dataset.at === '99'")


@pytest.mark.slow(keep=("nobody", "damaged"))
@pytest.mark.parametrize(
    "link",
    [
        "#e=0",
        "#e=x&step=-1",
        "#req=nobody",
        pytest.param("#%", id="damaged"),
        pytest.param("#e=999999999", id="behind"),
    ],
)
def test_an_address_that_leads_nowhere(opened: Any, link: str) -> None:
    events = read_run(RECORDED / "one_request").events
    first = next(i for i, e in enumerate(events) if e.name == "sched.scheduled")
    assert opened(RECORDED / "one_request", link=link).at() == (len(events) - 1 if "999" in link else first)


@pytest.mark.slow
def test_the_tour_stops_in_each_phase(opened: Any) -> None:
    events = read_run(RECORDED / "one_request").events
    player = opened(RECORDED / "one_request")
    for phase in range(1, 10):
        assert events[player.press("t")].phase == phase
        assert player.text("#tour-stop").startswith(str(phase)) and f"stop {phase} of 9" in player.text("#tour-count")
        assert len(player.text("#tour-words")) > 40
    player.page.locator("#tour-back").click()
    assert player.text("#tour-stop").startswith("8") and events[player.at()].name == "sched.scheduled"
    player.press("t", "t")
    assert not player.page.locator("#tour").is_visible()
    player.press("t", "Escape")
    assert (
        not player.page.locator("#tour").is_visible() and player.press("ArrowRight") == player.press("ArrowRight") - 1
    )


@pytest.mark.slow(keep="dp2_death")
@pytest.mark.parametrize(
    ("name", "told", "count"), [("engine_death", "engine.dead", 1), ("dp2_death", "dp.engine_lost", 3)]
)
def test_a_dead_engine_is_seen_dead(opened: Any, name: str, told: str, count: int) -> None:
    """Also one of several: its lane and its panels, and when its death was seen; the others live."""
    events = read_run(RECORDED / name).events
    at = next(i for i, e in enumerate(events) if e.name == told)
    player = opened(RECORDED / name)
    player.read(at - 1)
    assert player.page.locator(".dead").count() == 0
    player.read(at)
    assert player.page.locator(".lane.dead").count() == player.page.locator(".core.dead").count() == 1
    assert player.page.locator(".core").count() == count
    seen = player.page.evaluate("at => timeText(player.recordings[0].events[at].us)", at)
    assert f"Seen {seen} after the start" in player.text(".core.dead .whose")
    assert f"Seen {seen} after the start" in player.text(".lane.dead .inside")
    assert player.page.evaluate(CONTRAST) == []
    player.read(at - 1)
    assert player.page.locator(".dead").count() == 0


@pytest.mark.slow
def test_the_axis_is_time_and_zooms(opened: Any) -> None:
    player = opened(RECORDED / "mixed")
    view = "player.panels[0].timeline.view"
    first, end = player.page.evaluate(view)
    us = player.page.evaluate("player.recordings[0].events.map(({us}) => us)")
    assert first == max(us[: player.at() + 1]) and end == max(us)
    middle = player.read(700)[0] and player.page.evaluate("player.panels[0].timeline.clock[700]")
    player.page.keyboard.press("w")
    left, right = player.page.evaluate(view)
    assert left <= middle <= right and right - left == pytest.approx((end - first) / 2)
    player.press("s", "0")
    assert player.page.evaluate(view) == [first, end]
    player.press("Home")
    assert player.page.evaluate(view)[0] <= us[0], "what is shown goes where the reader goes"
    box = player.page.locator(".tracks").bounding_box()
    player.page.locator(".tracks").click(position={"x": 64 + (box["width"] - 64) / 2, "y": 30})
    left, right = player.page.evaluate(view)
    clock = player.page.evaluate("[...player.panels[0].timeline.clock]")
    assert player.at() == max(
        i for i, us in enumerate(clock) if us <= (left + right) / 2 + (right - left) / box["width"]
    )


@pytest.mark.slow
def test_rows_that_run_are_brought_into_view(opened: Any) -> None:
    run, rng = InventedRun(random.Random(2), num_blocks=400, budget=400), range(40)
    run.created()
    for _ in rng:
        run.arrive(5)
    for _ in range(4):
        run.step()
    player = opened(Run(run.events, run_ids={"many"}))
    for place in [i for i, e in enumerate(run.events) if e.name == "sched.scheduled"][-12:]:
        player.read(place)
        seen = """id => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
          const row = document.querySelector(`.rows [data-id="${id}"]`), list = document.querySelector(".rows");
          done(row.offsetTop >= list.scrollTop - 1 && row.offsetTop + row.offsetHeight <= list.scrollTop + list.clientHeight + 1); })))"""
        assert player.page.evaluate(seen, run.events[place].req), place
    assert player.page.evaluate("document.querySelector('.rows').scrollTop") > 0


def test_an_event_leads_to_its_line(opened: Any) -> None:
    """A page that stays here links to file and walk; one to be sent names them, and says nothing about this machine."""
    events = read_run(RECORDED / "mixed").events
    queued = next(i for i, e in enumerate(events) if e.name == "sched.queued")
    player = opened(RECORDED / "mixed", link=f"#e={queued + 1}")
    assert f"stage03_engine/core/{events[queued].src}" in player.text(".event .facts")
    assert player.page.locator(".facts a").count() == 0
    assert f"{WALK}#fn=Scheduler.add_request" in player.page.locator(".facts code").all_text_contents()
    root = Path(__file__).parents[2]
    both = read_run(RECORDED / "servers2").events  # `server.stopped` is said by two files
    places = page_data(RECORDED / "servers2")["places"]
    assert {f"{e.name} {e.src.partition(':')[0]}" for e in both if e.name == "server.stopped"} <= {*places}
    for event, (folder, function, *walked) in {**places, **page_data(RECORDED / "mixed")["places"]}.items():
        name, file = event.split(" ")
        source = (root / folder / file).read_text(encoding="utf-8")
        assert f'"{name}"' in source and (not function or f"def {function.rpartition('.')[2]}(" in source)
        assert not walked or f'"{function}"' in (root / WALK).read_text(encoding="utf-8")


def test_keys_step_through_the_recording(opened: Any) -> None:
    run = read_run(RECORDED / "mixed")
    player = opened(RECORDED / "mixed")
    decided = [i for i, e in enumerate(run.events) if e.name == "sched.output"]
    assert player.press("Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft") == 2
    assert player.press("Shift+ArrowRight") == decided[0]
    assert player.press("Shift+ArrowRight", "Shift+ArrowRight") == decided[2]
    assert player.press("Shift+ArrowLeft") == decided[1]
    assert player.press("End") == len(run.events) - 1 == player.press("ArrowRight")
    assert player.press("Home") == 0 == player.press("ArrowLeft")
    assert "event 1 of" in player.page.locator("#slider").get_attribute("aria-valuetext")
    assert run.events[0].name in player.text("#announcement")  # what a screen reader says


def test_play_moves_and_stops(opened: Any) -> None:
    from playwright.sync_api import expect

    player = opened(RECORDED / "one_request")
    player.page.locator("#speed").select_option(label="40 events/s")
    player.page.keyboard.press("Escape")
    player.page.locator("#runs").focus()
    player.press("Home", " ")
    expect(player.page.locator(".run")).to_have_attribute("data-at", re.compile(r"[1-9]\d"))
    assert "pause" in player.text("#play")
    stopped = player.press(" ")
    assert "play" in player.text("#play") and player.at() == stopped
    last = len(read_run(RECORDED / "one_request").events) - 1
    player.press("End", "ArrowLeft", " ")
    expect(player.page.locator("#play")).to_contain_text("play")
    assert player.at() == last


def test_a_search_finds_events_by_name(opened: Any) -> None:
    events = read_run(RECORDED / "preemption").events
    preempted = [i for i, e in enumerate(events) if e.name == "sched.preempt"]
    player = opened(RECORDED / "preemption")
    player.press("/")
    player.page.keyboard.type("PREEMPT")
    assert player.text("#found") == f"{len(preempted)} found"
    assert player.press("Enter") == preempted[0]
    assert player.press("Enter", "Enter") == preempted[2] and player.press("Shift+Enter") == preempted[1]
    player.press("Escape")
    assert player.press("n") == preempted[2] and player.press("p") == preempted[1]
    assert player.press("n", *["n"] * len(preempted)) == preempted[-1]  # nothing behind the last one
    assert "Nothing more" in player.text("#announcement")


def test_one_request_alone(opened: Any) -> None:
    events = read_run(RECORDED / "mixed").events
    player = opened(RECORDED / "mixed")
    player.press("Home")
    player.page.locator("#filter").select_option(label="only r3")
    own = [i for i, e in enumerate(events) if e.req and "-r3-" in e.req]
    assert player.at() == own[0]
    player.page.locator("#runs").focus()
    assert [player.press("ArrowRight") for _ in range(20)] == own[1:21]
    assert set(player.page.locator(".list .who").all_text_contents()) == {"r3"}
    player.page.locator("#go-token").fill("3")
    assert player.press("Enter") == next(
        i for i in own if events[i].name == "sched.token" and events[i].args["num_output_tokens"] == 3
    )
    player.page.locator("#go-step").fill("12")
    player.press("Enter")
    twelfth = next(i for i, e in enumerate(events) if e.name == "sched.output" and e.step == 12)
    assert player.at() == twelfth
    assert player.press("ArrowRight") == next(i for i in own if i > twelfth), "the keys work at once after `go`"
    assert player.page.locator(".rows .dim").count() > 0  # the others are still there


def test_why_somebody_waits(opened: Any) -> None:
    events = read_run(RECORDED / "preemption").events
    labels = dict(short_names(dict.fromkeys(e.req for e in events if e.req)))
    places = [i for i, e in enumerate(events) if e.name == "sched.held_back"][:12]
    for place, shown in zip(places, opened(RECORDED / "preemption").read(*places)):
        args = events[place].args
        words = {"blocks": f"the {args['free_blocks']} that are free", "preempted": "just preempted"}[args["rule"]]
        assert shown["heldBack"].startswith(f"{labels[args['first']]} is held back") and words in shown["heldBack"]
        assert all(labels[request_id] in shown["heldBack"] for request_id in args["behind"])


def changed(run: Run, step: int) -> Run:
    """The same run, but in this step the scheduler gives one request one token less."""
    events = list(run.events)
    at = next(i for i, e in enumerate(events) if e.name == "sched.scheduled" and e.step == step)
    old = events[at]
    args = old.args | {"num_tokens": old.args["num_tokens"] - 1}
    events[at] = Event(old.v, old.seq, old.ts, old.pid, old.proc, old.ph, old.name, old.phase, old.src, old.req, old.step, old.cause, args)  # fmt: skip
    del events[next(i for i, e in enumerate(events) if i > at and e.name == "sse.chunk")]  # and that step is shorter
    return Run(events, run_ids={"changed"})


@pytest.mark.slow
def test_two_runs_side_by_side(opened: Any) -> None:
    run = read_run(RECORDED / "mixed")
    player = opened(run, changed(run, 9))
    assert player.page.locator(".run").count() == 2
    assert "step 9" in player.text("#difference") and "A: " in player.text("#difference")
    player.press("Shift+ArrowRight")
    assert player.page.locator(".run-same").all_text_contents() == ["= the same so far"] * 2
    player.press("d")
    assert all(text == "≠ the first difference" for text in player.page.locator(".run-same").all_text_contents())
    for _ in range(6):
        steps = [re.search(r"engine step (\d+)", text) for text in player.page.locator(".run-when").all_text_contents()]
        assert steps[0] and steps[1] and steps[0][1] == steps[1][1]
        assert player.page.locator(".event-name").all_text_contents() == ["sched.output"] * 2
        player.press("Shift+ArrowRight")
    shared = opened(run, run)
    assert shared.text("#difference") == "= The same decisions in every step."
    assert shared.press("End") == shared.at(1) == len(run.events) - 1


@pytest.mark.slow(keep="stall")
@pytest.mark.parametrize("bug", ["bug_leak", "bug_stall", "bug_starvation"])
def test_the_first_difference_is_that_of_diff(opened: Any, bug: str) -> None:
    lane = compare(RECORDED / bug, RECORDED / f"{bug}_healthy", only_core=True).steps[0]
    assert isinstance(lane.a, StepFacts)
    player = opened(RECORDED / bug, RECORDED / f"{bug}_healthy")
    assert f"first difference: step {lane.a.step}" in player.text("#difference")
    player.press("d")
    assert f"engine step {lane.a.step} " in player.text(".run-when")
    assert player.page.locator(".only-here li").count() > 0


@pytest.mark.slow
def test_a_quiet_page_for_who_wants_one(opened: Any) -> None:
    sent = next(i for i, e in enumerate(read_run(RECORDED / "mixed").events) if e.name == "zmq.request_sent")
    animation = "getComputedStyle(document.querySelector('.zmq .pill')).animationName"
    player = opened(RECORDED / "mixed")
    for motion, expected in (("no-preference", "from-left"), ("reduce", "none")):
        player.page.emulate_media(reduced_motion=motion)
        player.read(sent)
        assert player.page.evaluate(animation) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_has_the_colours_of_the_figures(opened: Any, scheme: str) -> None:
    player = opened(RECORDED / "preemption", color_scheme=scheme)
    border = "kind => getComputedStyle(document.querySelector(`.legend .t-${kind}`)).borderTopColor"
    for kind in ("prefill", "decode", "preempted"):
        assert player.page.evaluate(border, kind) == rgb(KINDS[kind].face)
    player.read(600)
    stripes = "[...document.querySelectorAll('.rows [data-request]')].map(e => [Number(e.dataset.id.match(/r(\\d+)/)[1]), getComputedStyle(e).borderLeftColor])"
    found = player.page.evaluate(stripes)
    assert len(found) > 3 and found == [[place, rgb(request_look(place).face)] for place, _ in found]


def rgb(colour: str) -> str:
    """`#0072b2` as a browser writes it."""
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


CONTRAST = """() => {
  const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(n => n / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = element => { const color = getComputedStyle(element).backgroundColor; return /rgba\\(.*, 0\\)/.test(color) ? back(element.parentElement) : color; };
  const solid = element => getComputedStyle(element).backgroundImage === "none" && !back(element).startsWith("color");
  return [...document.querySelectorAll("main *, footer *")].filter(e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && solid(e))
    .map(e => { const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x); return [(a + 0.05) / (b + 0.05), e.className || e.tagName, e.textContent]; })
    .filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.slow(keep="700-dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [700, 1400])
def test_it_fits_and_can_be_read(opened: Any, scheme: str, width: int) -> None:
    player = opened(RECORDED / "preemption", color_scheme=scheme)
    player.page.set_viewport_size({"width": width, "height": 900})
    player.read(1200)
    assert player.page.evaluate("document.documentElement.scrollWidth") <= width
    assert player.page.evaluate(CONTRAST) == []
    background = player.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")


@pytest.mark.slow
def test_everything_can_be_reached_and_has_a_name(opened: Any) -> None:
    player = opened(RECORDED / "mixed")
    names = set()
    for _ in range(40):
        player.page.keyboard.press("Tab")
        names.add(
            player.page.evaluate(
                "(() => { const e = document.activeElement; return [e.id || e.className, e.ariaLabel || e.labels?.[0]?.textContent || e.textContent,"
                " getComputedStyle(e).outlineStyle] })()"
            ).__str__()
        )
    for control in ("slider", "play", "event-on", "step-back", "speed", "filter", "go-step", "search-text", "help"):
        found = [name for name in names if name.startswith(f"['{control}'")]
        assert found and "''" not in found[0] and "'none'" not in found[0], control
    player.page.keyboard.press("?")
    if not player.page.locator("#help-dialog").is_visible():
        player.page.locator("#help").click()
    assert player.page.get_by_role("dialog").is_visible()
    player.page.keyboard.press("Escape")
    assert not player.page.locator("#help-dialog").is_visible()
    assert player.page.get_by_role("slider").count() == 1 and player.page.get_by_role("status").count() == 2


EVIL = [
    "</title></style><script>alert(1)</script>",
    "</script foo",
    "<!--<script ",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><b>&amp;<!--",
    "@@DATA@@",
    "${alert(1)}",
]


def evil_run() -> Run:
    """A recording in which everything that a client could have written is an attack."""
    events, step = [], 0
    for evil in EVIL:
        rows = [
            ("http.request", {"method": evil, "path": evil}),
            ("sched.queued", {"waiting": 1, "num_prompt_tokens": 3, "params": {}, "block_hashes": []}),
            ("engine.step", {"running": 0, "waiting": 1}),
            ("sched.held_back", {"rule": evil, "first": evil, "behind": [evil], "held": [], "budget_left": 1, "free_blocks": 1, "num_running": 1}),
            ("request.tokenized", {"num_tokens": 1, "prompt": evil, "token_ids": []}),
            ("request.detokenized", {"num_tokens": 1, "characters": 1, "text": evil}),
            ("request.stop_matched", {"stop": evil}),
            ("nobody.knows", {evil: evil}),
        ]  # fmt: skip
        for name, args in rows:
            step += name == "engine.step"
            ph, seq = "B" if name == "engine.step" else "i", len(events)
            events.append(Event(1, seq, 1000 + seq, 7, evil, ph, name, 8, evil, None if ph == "B" else evil, step, None, args))  # fmt: skip
    return Run(events, run_ids={EVIL[0]})


def test_what_a_client_wrote_is_text(opened: Any) -> None:
    run = evil_run()
    player = opened(run, run)
    player.page.on("dialog", lambda dialog: player.errors.append(dialog.message))
    for place in range(0, len(run.events), 3):
        player.read(place)
        assert player.page.evaluate("document.querySelectorAll('img, main b b, script').length") == 2  # its own scripts
    assert player.page.locator(".run[data-run=A] .texts .prompt").all_text_contents() == EVIL
    assert player.page.locator(".run[data-run=A] .texts .answer").all_text_contents() == EVIL
    assert player.page.title().startswith(f"run {EVIL[0]} and")
    player.read(3)
    reasons = player.page.locator(".held-back").all_text_contents()  # each name of the process is an engine here
    assert any(EVIL[0] in reason for reason in reasons) and EVIL[0] in player.text(".event .facts")


@pytest.mark.slow
def test_in_a_notebook(browser: Any, tmp_path: Path) -> None:
    """The frame of a notebook cell, or of an exported page: it gets the keys, and its scripts run in there."""
    shown = show(RECORDED / "one_request", height=500)._repr_html_()
    assert 'height="500"' in shown and len(shown) < 1.1 * len(page(RECORDED / "one_request"))
    player = Opened(browser)
    player.load(tmp_path, f"<!doctype html><h1>A notebook</h1>{shown}")
    frame = player.page.frame_locator("iframe")
    frame.locator("#event-on").click()
    frame.locator("body").press("ArrowRight")
    events = read_run(RECORDED / "one_request").events
    first = next(i for i, e in enumerate(events) if e.name == "sched.scheduled")
    assert frame.locator(".run").get_attribute("data-at") == str(first + 2)
    assert player.errors == [] and all(url.startswith(("file:", "about:", "data:")) for url in player.requests)
    player.context.close()


# The builder, without a browser


def test_the_page_holds_each_event_once() -> None:
    run = read_run(RECORDED / "mixed")
    table = page_data(run)
    assert len(table["events"]) == len(run.events)
    for row, event in zip(table["events"], run.events):
        us, process, kind, source, ph, values, step, req, cause = row
        assert table["processes"][process] == (event.pid, event.proc) and table["kinds"][kind] == (
            event.name,
            *event.args,
        )
        assert (table["sources"][source], "iBE"[ph], values) == (event.src, event.ph, list(event.args.values()))
        assert (step, req) == (-1 if event.step is None else event.step, -1 if event.req is None else req)
        assert event.req is None or table["requests"][req][0] == event.req
        assert event.cause is None or run.events[cause].ref == event.cause
        assert us == (event.ts - min(e.ts for e in run.events)) // 1000
    assert page_data(run) | {"title": "mixed"} == page_data(RECORDED / "mixed")
    assert page(Recording(RECORDED / "mixed")) == page(str(RECORDED / "mixed"))


def test_scripts_travel_without_their_comments() -> None:
    assert (
        lean("/** What\n * it does. */\nconst a = 1;\n\n  // why\n  b(a); // kept\n/* one line */\nc();\n")
        == "const a = 1;\nb(a); // kept\nc();\n"
    )
    assert "Part 1 of" not in page(RECORDED / "one_request")


def test_requests_have_short_names() -> None:
    ids = ["cmpl-r0-b281c1bc-0", "cmpl-r0-b281c1bc-1", "1_chatcmpl-mine-b281c1bc-0", "0_cmpl-" + "a" * 32 + "-0", "7"]
    assert [name for _, name in short_names(ids)] == ["r0", "r0-1", "1_mine", "0_#3", "7"]
    twice = short_names(["cmpl-a-00000000-0", "cmpl-a-11111111-0", "cmpl-#1-11111111-0", "cmpl-b-11111111-0"])
    assert [name for _, name in twice] == ["#1", "#2", "#3", "b"]
    alike = short_names(["cmpl-a-00000000-1", "cmpl-a-1-11111111-0"])
    assert len({name for _, name in alike}) == 2


def test_what_cannot_be_played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no trace in"):
        page(tmp_path)
    with pytest.raises(TraceError, match="no events"):
        page(Run([]))
    monkeypatch.setattr(data, "MAX_EVENTS", 100)
    with pytest.raises(TraceError, match="more than 100 events.*Perfetto"):
        page(RECORDED / "mixed")


# The command


def test_play_writes_a_page_and_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], opened: Any
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda link: seen.append(link) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = str(RECORDED / "mixed")
    assert main(["play", run]) == 0
    (link,) = capsys.readouterr().out.split()
    assert seen == [link] and Path(link.removeprefix("file://")).name == "mixed.html"
    out = tmp_path / "mine.html"
    assert main(["play", run, "--req", "r3", "--out", str(out), "--no-open"]) == 0
    assert seen == [link] and capsys.readouterr().out == out.as_uri() + "\n"
    text = out.read_text(encoding="utf-8")
    assert page(RECORDED / "mixed", start="req=r3", root=Path(__file__).parents[2]) == text
    player = opened(RECORDED / "mixed")
    player.page.goto(out.as_uri())
    player.page.wait_for_function("player !== null")
    assert player.page.locator("#filter").input_value() == "r3"
    link = player.page.locator(".facts a").first.get_attribute("href")
    assert Path(link.removeprefix("file://")).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "99999"], "--step 99999: no such step in this recording; its steps are 1 to "),
        (["--req", "nobody"], "--req nobody: no such request in this recording; it has r0, r1"),
        (["--out", "no/such/run.html"], "does not exist; create it first"),
        (["--out", "."], "is a folder; name a file in it"),
    ],
)
def test_play_refuses_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", str(RECORDED / "mixed"), "--no-open", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


# The slider, pulled

PULL = """places => new Promise(done => {
  const draw = player.draw.bind(player), drawn = [], slider = document.getElementById("slider");
  player.draw = (whole = true) => { drawn.push([player.position, whole]); draw(whole); };
  for (const place of places) { slider.value = place; slider.dispatchEvent(new Event("input")); }
  requestAnimationFrame(() => {
    const text = selector => document.querySelector(selector).textContent;
    player.draw = draw;
    done({ drawn, when: text(".run-when"), event: text(".event-name"), free: document.querySelector(".blocks").dataset.free });
  });
})"""


def test_a_picture_shows_the_newest_place_of_a_pulled_slider(opened: Any) -> None:
    """Of that only what lies in the window; the rest follows once the slider stays somewhere, or is let go."""
    player = opened(RECORDED / "preemption")
    player.page.set_viewport_size({"width": 1400, "height": 500})
    away = "player.panels[0].away.has(document.querySelector('.detail'))"
    wait_until(lambda: player.page.evaluate(away), "the list of events is still in the window")
    player.read(20)
    wanted = {place: player.read(place)[0] for place in (20, 900, 1500)}
    before, first, second = (wanted[place]["event"] for place in (20, 900, 1500))
    assert len({before, first, second}) == 3 and wanted[20]["free"] != wanted[900]["free"]
    player.read(20)
    shown = player.page.evaluate(PULL, [300, 600, 900])
    assert shown["drawn"] == [[900, False]]
    assert shown["when"].startswith("event 901 of") and shown["free"] == str(wanted[900]["free"])
    assert shown["event"] == before  # nobody sees it
    wait_until(lambda: player.text(".event-name") == first, "the slider stays, and not all is drawn")
    assert player.text("#announcement").startswith("event 901 of")
    player.page.evaluate(PULL, [1200, 1500])
    player.page.evaluate("document.getElementById('slider').dispatchEvent(new Event('change'))")
    assert player.text(".event-name") == second


@pytest.mark.slow
def test_a_key_counts_more_than_where_the_slider_was_before_it(opened: Any) -> None:
    player = opened(RECORDED / "preemption")
    at = player.page.evaluate(
        """() => new Promise(done => {
          const slider = document.getElementById("slider");
          slider.value = 900;
          slider.dispatchEvent(new Event("input"));
          player.goTo(40);
          requestAnimationFrame(() => requestAnimationFrame(() => done([player.position, Number(slider.value)])));
        })"""
    )
    assert at == [40, 40]


def test_blocks_that_an_event_names_have_a_frame_and_no_others(opened: Any) -> None:
    player = opened(RECORDED / "preemption")
    events = read_run(RECORDED / "preemption").events
    naming = [place for place, event in enumerate(events) if event.name in ("kv.allocated", "kv.cached", "kv.freed")]
    for place in [near for one in random.Random(7).sample(naming, 12) for near in (one, one + 1, one - 1)]:
        player.page.evaluate("place => player.goTo(place)", place)
        framed = player.page.evaluate(
            "[...player.panels[0].engines[0].blocks.looks.entries()].filter(([, look]) => look & 2).map(([id]) => id)"
        )
        args = events[place].args
        named = {*args.get("blocks", ()), *args.get("new_blocks", ())}
        named |= {args["block"]} if events[place].name == "kv.evicted" else set()
        assert set(framed) == named, events[place]
