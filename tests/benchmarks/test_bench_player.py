"""How long the player's scripts take for a key, and how many pictures a second its slider makes: 200 requests, some 100,000 events, in Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from toy_engine import STEM, ToyEngine, record

from stagetrace import Run, read_run
from stagetrace.event import Event
from stagetrace.player import page

pytest_plugins = ["browser"]

NUM_REQUESTS, NUM_TOKENS = 200, 110
KEYS = 60
SECONDS = 3  # that the slider is pulled
MOST_SCRIPT, LEAST_FRAMES = 16, 30  # what is aimed at, on cores that nobody shares: ms for a key, pictures a second

KEY = """keys => { const before = performance.now();
  for (const [key, shiftKey] of keys) document.body.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey, bubbles: true, cancelable: true}));
  return (performance.now() - before) / keys.length; }"""
ONE_KEY_A_PICTURE = """keys => new Promise(done => {
  const took = [];
  const next = () => {
    if (took.length === keys.length) return done(took);
    const [key, shiftKey] = keys[took.length], before = performance.now();
    document.body.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey, bubbles: true, cancelable: true}));
    requestAnimationFrame(() => { took.push(performance.now() - before); next(); });
  };
  requestAnimationFrame(next);
})"""
PULL = """seconds => new Promise(done => {
  const slider = document.getElementById("slider"), began = performance.now();
  let pictures = 0;
  const next = () => {
    const share = (performance.now() - began) / (1000 * seconds);
    if (share >= 1) return done(pictures / seconds);
    const back = share > 0.5;  // there and back again
    slider.value = Math.round((back ? 2 - 2 * share : 2 * share) * player.length);
    slider.dispatchEvent(new Event("input"));
    pictures += 1;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})"""


def busy_run(folder: Path) -> Run:
    """All requests at once in a small cache, so that they are preempted; the front end answers after each step."""

    def life() -> None:
        settings = {"num_blocks": 1500, "block_size": 16, "max_model_len": 1024, "max_num_seqs": 128}
        engine = ToyEngine(1, **settings, max_num_batched_tokens=512)
        for i in range(NUM_REQUESTS):
            prompt = [*STEM[: engine.rng.randint(1, 80)], i % 50]
            engine.add(f"r{i}", prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.run()

    record(folder, life)
    events: list[Event] = []
    for event in read_run(folder).events:
        events.append(event)
        if event.name == "sched.token":
            for name, args in (
                ("request.detokenized", {"num_tokens": 1, "characters": 5, "text": "word ", "token_ids": [7]}),
                ("sse.chunk", {"bytes": 200}),
            ):
                seq = 10**6 + len(events)
                events.append(
                    Event(1, seq, event.ts, 1, "APIServer", "i", name, 9, "x.py:1", event.req, None, None, args)
                )
    return Run(events, run_ids={"busy"})


def cpu_of(tab: Any, script: str, argument: Any) -> tuple[Any, float, float]:
    """What the script returns, and ms of CPU time of the page's thread meanwhile: of all its tasks, and of the functions in them. Other
    programs make the clock's times longer, these hardly."""
    browser = tab.context.browser
    browser.start_tracing(page=tab, categories=["devtools.timeline", "disabled-by-default-devtools.timeline"])
    answer = tab.evaluate(script, argument)
    spent: dict[tuple[int, int], dict[str, float]] = {}
    for event in json.loads(browser.stop_tracing())["traceEvents"]:
        if event["name"] in ("RunTask", "FunctionCall") and "tdur" in event:
            thread = spent.setdefault((event["pid"], event["tid"]), {"RunTask": 0.0, "FunctionCall": 0.0})
            thread[event["name"]] += event["tdur"] / 1000
    ours = max(spent.values(), key=lambda thread: thread["FunctionCall"])
    return answer, ours["RunTask"], ours["FunctionCall"]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
    run = busy_run(tmp_path / "run")
    file = tmp_path / "player.html"
    file.write_text(page(run), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1400, "height": 1000})
    tab.goto(file.as_uri())
    tab.wait_for_function("player !== null", timeout=120_000)
    return tab, len(run.events)


def test_a_key_and_the_slider(benchmark: BenchmarkFixture, opened: Any) -> None:
    """A key takes the script and, until the next picture, the browser's layout and paint; all three are told."""
    tab, count = opened
    tab.evaluate("player.goTo(Math.floor(player.length / 2))")
    of_event = [["ArrowRight", False], ["ArrowLeft", False]] * (KEYS // 2)
    of_step = [["ArrowRight", True]] * (KEYS // 2) + [["ArrowLeft", True]] * (KEYS // 2)
    found = {}
    for name, keys in (("event", of_event), ("step", of_step)):
        took, cpu, script = cpu_of(tab, ONE_KEY_A_PICTURE, keys)
        found[name] = (tab.evaluate(KEY, keys), sorted(took)[len(took) // 2], cpu / len(keys), script / len(keys))
    benchmark.pedantic(tab.evaluate, args=(KEY, of_step), rounds=3)
    frames = tab.evaluate(PULL, SECONDS)
    pulled, *cpu_of_slider = cpu_of(tab, PULL, SECONDS)
    benchmark.extra_info["events"] = count
    for name, (script, whole, *cpu) in found.items():
        benchmark.extra_info[f"ms of script for a key that moves by one {name} (aim: {MOST_SCRIPT})"] = round(script, 1)
        benchmark.extra_info[f"ms to the next picture after a key that moves by one {name}"] = round(whole, 1)
        told = f"ms of CPU time for a key that moves by one {name}, and its picture; of which script"
        benchmark.extra_info[told] = [round(each, 1) for each in cpu]
    benchmark.extra_info[f"pictures a second while the slider is pulled (aim: {LEAST_FRAMES})"] = round(frames, 1)
    told = "ms of CPU time for a picture of the slider; of which script"
    benchmark.extra_info[told] = [round(each / (pulled * SECONDS), 1) for each in cpu_of_slider]
    assert 90_000 <= count <= 130_000 and tab.evaluate("player.position") < count
