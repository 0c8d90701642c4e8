"""The page at `/` in a real browser: it asks, stops, shows the engine as it is, and talks to nobody but its server."""

from __future__ import annotations

import json
import random
import shlex
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from barriers import without_scripts
from opened_page import Opened
from patience import PATIENCE
from server_under_test import ServerProcess
from toy_engine import ToyEngine

from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset
from stage03_engine.core.features.scheduler_watch.scheduler_watch import SchedulerWatch, cached_blocks
from stagetrace import trace

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py

STATE_OF = """state => {
    const open = [...state.requests].filter(([, request]) => request.status !== "ended");
    return {
      running: open.filter(([, r]) => r.status === "running").map(([id, r]) => [id, r.tokens, r.computed]).sort(),
      waiting: open.filter(([, r]) => r.status !== "running").map(([id, r]) => [id, r.tokens, r.computed]).sort(),
      holders: [...state.holders].map(([block, who]) => [block, [...who].sort()]).sort((a, b) => a[0] - b[0]),
      cached: [...state.cached].sort((a, b) => a - b),
      free: state.free,
    };
}"""
READ_STATE = f"""batches => {{
  const state = new EngineState();
  return batches.map(lines => {{
    for (const line of lines) state.apply(JSON.parse(line));
    return ({STATE_OF})(state);
  }});
}}"""
READ_VIEWS = f"""batches => {{
  const shown = batches.map(lines => {{
    for (const line of lines) apply(JSON.parse(line));
    return Object.fromEntries(views.map(view => [view.number, ({STATE_OF})(view.state)]));
  }});
  views.forEach(view => view.draw());
  return shown;
}}"""
SEEN = """[...document.querySelectorAll(".engine")].map(engine => ({
  name: engine.querySelector("h3").hidden ? "" : engine.querySelector("h3").textContent,
  past: engine.classList.contains("past"),
  step: engine.querySelector("dd").textContent,
  rows: [...engine.querySelectorAll("tbody tr")].map(row => row.dataset.req),
}))"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--num-gpu-blocks-override", "80")
    server.wait_until_ready()
    yield server
    server.close()


@pytest.mark.slow
def test_without_scripts_it_shows_what_it_looks_like_with_them(browser: Any, server: ServerProcess) -> None:
    """And how to ask without it."""
    ((_, pictures, words),) = without_scripts(browser, [server.url])
    assert len(pictures) == 1 and "playground" in pictures[0] and "POST v1/completions" in words


@pytest.fixture
def opened(browser: Any, server: ServerProcess) -> Iterator[Any]:
    pages: list[Opened] = []

    def open_page(**context: Any) -> Opened:
        pages.append(Opened(browser, server.url + "/", **context))
        return pages[-1]

    yield open_page
    for one in pages:
        one.context.close()
        assert one.errors == []
        assert {r.url.removeprefix(server.url).partition("?")[0] for r in one.requests if not r.url.startswith("data:")} <= {
            "/", "/v1/models", "/v1/engine/events", "/v1/completions", "/v1/chat/completions",
        }  # fmt: skip


def test_it_streams_a_completion_and_the_curl_command_asks_the_same(opened: Any) -> None:
    page = opened()
    page.send('ROMEO: it\'s "so"\n', temperature="0", max_tokens="12")
    shown = page.answer()
    words = shlex.split(page.page.text_content("#curl").replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    url = next(word for word in words if word.startswith("http"))
    assert body["stream"] and body["max_tokens"] == 12
    again = httpx.post(url, json=body | {"stream": False, "stream_options": None}).json()
    assert shown == again["choices"][0]["text"] != ""
    assert f"{again['usage']['prompt_tokens']} prompt tokens · 12 generated · ended: length" in page.page.text_content(
        "#summary"
    )


def test_a_chat_goes_on_and_its_texts_are_never_markup(opened: Any) -> None:
    page = opened()
    page.page.check("[name=kind][value=chat]")
    assert page.page.is_visible("[name=system]")
    page.send("<img src=x onerror=alert(1)>", system="Speak.", max_tokens="5", temperature="0")
    first = page.answer()
    page.page.evaluate("document.getElementById('summary').textContent = ''")
    page.send("And then?")
    page.answer()
    asked = json.loads([r for r in page.requests if r.url.endswith("/chat/completions")][-1].post_data)
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "user"]
    assert asked["messages"][2]["content"] == first
    assert page.page.locator("#output img").count() == 0
    page.page.click("#clear")
    assert page.page.text_content("#output") == ""


STOP_ONCE_IT_RUNS = """() => new Promise((done) => {
  const look = () => {
    if (live.count("running") !== 1 || !live.holders.size) return setTimeout(look, 1);
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    done();
  };
  look();
})"""
"""In the page itself: the whole answer takes about a second, and a busy machine may take longer to press a key from outside."""


@pytest.mark.slow
def test_stop_frees_the_blocks(opened: Any, server: ServerProcess) -> None:
    page = opened()
    page.until("live.known")
    page.send("once more", max_tokens="500", temperature="1")
    page.page.evaluate(STOP_ONCE_IT_RUNS)
    page.until("live.count('running') === 0 && live.holders.size === 0")
    page.until("document.getElementById('pictures').dataset.used === '0'")
    assert "stopped" in page.page.text_content("#summary")
    assert "from outside" in page.page.locator("#rows tr").first.text_content()


@pytest.mark.slow
def test_a_refusal_is_told_in_words(opened: Any) -> None:
    page = opened()
    page.send("long " * 2000)
    page.until("document.getElementById('problem').textContent !== ''")
    assert "context" in page.page.text_content("#problem") or "tokens" in page.page.text_content("#problem")
    assert page.page.is_enabled("#send")
    page.errors = [error for error in page.errors if "400" not in error]  # the browser's own line about the status


@pytest.mark.slow
def test_the_keyboard_reaches_everything_and_the_key_is_not_shown(opened: Any) -> None:
    page = opened()
    page.page.fill("#api-key", "secret-key")
    page.page.press("#api-key", "Enter")
    page.page.fill("[name=prompt]", "x")
    assert "$OPENAI_API_KEY" in page.page.text_content("#curl")
    assert "secret-key" not in page.page.content()
    page.page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        page.page.keyboard.press("Tab")
        reached.add(page.page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"api-key", "kind", "model", "prompt", "max_tokens", "stop", "send", "clear", "output", "watch"} <= reached
    unnamed = "[...document.querySelectorAll('input, select, textarea, button, canvas')].filter(e => !(e.labels?.length || e.textContent || e.getAttribute('aria-label')))"
    assert page.page.evaluate(f"{unnamed}.length") == 0


@pytest.mark.slow(keep="dark-700")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 700)])
def test_it_fits_and_can_be_read(opened: Any, scheme: str, width: int) -> None:
    page = opened(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.send("To be", max_tokens="8")
    page.answer()
    page.page.click("summary")
    assert page.page.evaluate("document.documentElement.scrollWidth") == width
    contrast = """selector => {
      const light = text => { const c = text.match(/[\\d.]+/g).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
      let behind = document.querySelector(selector);
      const ink = light(getComputedStyle(behind).color);
      while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
      const paper = light(getComputedStyle(behind).backgroundColor);
      return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    }"""
    for selector in ("h1", ".caption", "label", ".words", "#send", "#stop-request", "th", "td", "a", "#curl"):
        assert page.page.evaluate(contrast, selector) >= 4.5, selector


@pytest.mark.slow
def test_it_watches_only_while_it_is_wanted(opened: Any, server: ServerProcess) -> None:
    page = opened()
    page.until("live.known")
    page.page.uncheck("#watch")
    step = page.page.evaluate("live.step")
    page.send("To be", max_tokens="4")
    page.answer()
    assert page.page.evaluate("live.step") == step
    page.page.check("#watch")
    page.until(f"live.step >= {step + 4}")


@pytest.mark.slow
def test_the_pictures_show_who_holds_what(opened: Any, server: ServerProcess) -> None:
    page = opened()
    page.until("live.known")
    body = {"prompt": "To be, or not to be, that is the question. " * 3, "max_tokens": 360, "ignore_eos": True}
    others = [
        threading.Thread(target=httpx.post, args=(server.url + "/v1/completions",), kwargs={"json": body})
        for _ in range(20)
    ]
    for other in others:
        other.start()
    page.until("live.count('running') > 1 && live.holders.size > 9 && live.steps.length > 20")
    count = "id => new Set(new Uint32Array(document.getElementById(id).getContext('2d').getImageData(0, 0, 400, 60).data.buffer)).size"
    page.until(
        "live.labels.size >= 20 && document.getElementById('lanes-text').textContent.startsWith('the last 16 of ')"
    )
    for picture in ("budget", "steps", "blocks"):
        assert page.page.evaluate(count, picture) > 2, picture
    assert "blocks in use" in page.page.get_attribute("#blocks", "aria-label")
    assert page.page.locator("#rows tr[data-status=running]").count() > 1
    for other in others:
        other.join()
    page.until("live.count('running') === 0 && live.holders.size === 0 && live.free === live.settings.num_blocks")


@pytest.mark.slow
def test_what_several_keys_may_not_watch_it_does_not_ask_for_again(browser: Any) -> None:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--api-key", "one", "two")
    try:
        context = browser.new_context()
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.wait_until_ready())
        page.fill("#api-key", "two")
        page.press("#api-key", "Enter")
        refused = page.locator("#watch:not(:checked)")
        refused.wait_for(timeout=1000 * PATIENCE)
        assert "--enable-engine-events" in page.text_content("#live-status")
        count = sum(url.endswith("/v1/engine/events") for url in asked)
        with page.expect_response("**/v1/engine/events", timeout=1000 * PATIENCE):
            page.click("#watch")  # somebody asks again
        refused.wait_for(timeout=1000 * PATIENCE)
        assert sum(url.endswith("/v1/engine/events") for url in asked) == count + 1
        context.close()
    finally:
        server.close()


def facts(engine: ToyEngine) -> dict[str, Any]:
    """What is true, in the words of the page."""
    scheduler = engine.scheduler
    pool, holders = scheduler.kv_cache_manager.block_pool, dict[int, list[str]]()
    for request in scheduler.running:
        for block in scheduler.kv_cache_manager.block_table(request.request_id):
            holders.setdefault(block, []).append(request.request_id)
    return {
        "running": sorted([r.request_id, r.num_tokens, r.num_computed_tokens] for r in scheduler.running),
        "waiting": sorted(
            [r.request_id, r.num_tokens, r.num_computed_tokens] for r in (*scheduler.waiting, *scheduler.held.values())
        ),
        "holders": [[block, sorted(who)] for block, who in sorted(holders.items())],
        "cached": sorted(cached_blocks(pool)),
        "free": pool.num_free,
    }


def life(seed: int, names: str = "r") -> tuple[list[list[str]], list[dict[str, Any]]]:
    """(what each step tells, from any moment on; what is true then) of a random engine whose requests have such names."""
    chance = random.Random(seed)
    engine = ToyEngine(seed, num_blocks=chance.choice([28, 34]), swap_blocks=seed % 2 * 40, num_drafts=seed % 3)
    watch = SchedulerWatch(engine.scheduler)
    joins = chance.randrange(30)
    batches: list[list[str]] = []
    truth: list[dict[str, Any]] = []
    try:
        for turn in range(80):
            if turn == joins or (turn > joins and chance.random() < 0.05):  # again: somebody else has joined
                watch.start()
            engine.add_random(f"{names}{turn}")
            if engine.scheduler.has_unfinished_requests:
                engine.step()
            if chance.random() < 0.1:
                engine.scheduler.finish_requests([f"{names}{chance.randint(0, turn)}"])
            if chance.random() < 0.1:
                reset(engine.scheduler)
            if turn >= joins:
                batches.append([line.decode() for line in watch.take()])
                truth.append(facts(engine))
    finally:
        trace.watch(None)
    return batches, truth


@pytest.mark.slow(keep="0")
@pytest.mark.parametrize("seed", range(6))
def test_its_state_is_the_schedulers(script: Any, seed: int) -> None:
    """Through arrivals, preemption, swapping, drafts, aborts and resets: after each step what the page made of the events is
    what the scheduler has."""
    batches, truth = life(seed)
    shown = script.evaluate(READ_STATE, batches)
    for place, (mine, real) in enumerate(zip(shown, truth, strict=True)):
        assert mine == real, f"after batch {place}"


def of_engine(batches: list[list[str]], number: int) -> list[list[str]]:
    """The same events, told by another engine."""
    return [[json.dumps(json.loads(line) | {"proc": f"EngineCore_DP{number}"}) for line in lines] for lines in batches]


def engines(**states: str) -> str:
    """What the front end says of its engines."""
    told = {name.removeprefix("e"): state for name, state in states.items()}
    return json.dumps({"proc": "APIServer", "name": "dp.engines", "args": {"states": told}})


@pytest.mark.slow
def test_what_two_engines_tell_is_not_mixed_up(script: Any) -> None:
    """Their steps, blocks and requests have the same numbers, and each view shows its own scheduler's."""
    chance = random.Random(1)
    lives = {number: life(number, f"e{number}-") for number in (0, 1)}
    told = {number: of_engine(batches, number) for number, (batches, _) in lives.items()}
    turns = chance.sample([number for number in told for _ in told[number]], k=sum(map(len, told.values())))
    left = {number: iter(batches) for number, batches in told.items()}
    shown = script.evaluate(READ_VIEWS, [[engines(e0="ready", e1="ready")], *(next(left[number]) for number in turns)])
    for number, (_, truth) in lives.items():
        own = [views[str(number)] for views, turn in zip(shown[1:], turns, strict=True) if turn == number]
        assert own == truth
    seen = script.evaluate(SEEN)
    assert [one["name"] for one in seen] == ["Engine 0: ready", "Engine 1: ready"]
    for number, one in enumerate(seen):
        assert one["rows"] and all(row.startswith(f"e{number}-") for row in one["rows"])
    labels = script.evaluate("[...document.querySelectorAll('tbody th')].map(th => th.textContent)")
    assert len(labels) == len(set(labels)), "two requests have one name"
    assert script.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == script.evaluate(
        "document.querySelectorAll('[id]').length"
    )
    assert script.text_content("#live-title") == "The engines, live"


@pytest.mark.slow
def test_an_engine_that_dies_turns_grey_and_its_successor_begins_from_nothing(script: Any) -> None:
    before, after = of_engine(life(2, "old-")[0], 1), of_engine(life(4, "new-")[0], 1)
    script.evaluate(READ_VIEWS, [[engines(e0="ready", e1="ready")], *before])
    assert script.evaluate(SEEN)[1]["rows"]
    for state in ("dead", "loading"):
        script.evaluate(READ_VIEWS, [[engines(e0="ready", e1=state)]])
        seen = script.evaluate(SEEN)
        assert [one["past"] for one in seen] == [False, True] and seen[1]["name"] == f"Engine 1: {state}"
        assert seen[1]["rows"], "what it did stays in sight"
    script.evaluate(READ_VIEWS, [[engines(e0="ready", e1="ready")], *after])
    seen = script.evaluate(SEEN)[1]
    assert not seen["past"] and seen["rows"] and all(row.startswith("new-") for row in seen["rows"])
    script.evaluate(READ_VIEWS, [[engines(e0="ready", e1="ready", e2="loading")]])
    assert [one["name"] for one in script.evaluate(SEEN)] == ["Engine 0: ready", "Engine 1: ready", "Engine 2: loading"]
    script.evaluate(READ_VIEWS, [[engines(e0="ready", e1="draining")]])
    assert [one["name"] for one in script.evaluate(SEEN)] == ["Engine 0: ready", "Engine 1: draining"]


@pytest.mark.slow
def test_a_single_engine_has_no_name_whatever_its_number(script: Any) -> None:
    script.evaluate(READ_VIEWS, of_engine(life(3)[0], 2))
    [one] = script.evaluate(SEEN)
    assert one["name"] == "" and not one["past"] and one["rows"]
    assert script.text_content("#live-title") == "The engine, live"
    assert script.get_attribute("#pictures", "role") is None


@pytest.mark.slow
def test_drafts_by_place_or_nothing_at_all(script: Any) -> None:
    """Of four requests' drafts in a step: 4 were verified in the first place, 3 in the second. A state in between forgets nothing."""
    state = life(3)[0][0]
    script.evaluate(READ_VIEWS, [[line for line in state if "spec.verified" not in line]])
    assert not script.is_visible("#drafts")
    told = [(2, 2), (1, 2), (0, 2), (0, 1)]
    verified = [
        json.dumps({"proc": "EngineCore_DP0", "name": "spec.verified", "req": "a", "step": 9, "args": {"accepted": a, "drafted": d}})
        for a, d in told
    ]  # fmt: skip
    script.evaluate(READ_VIEWS, [verified[:2], [state[0]], verified[2:]])
    assert script.is_visible("#drafts") and script.text_content("#drafts-text") == "50 % · 33 %"
    script.evaluate("views[0].state.clear(); views[0].draw()")
    assert not script.is_visible("#drafts"), "another engine begins from nothing"


@pytest.mark.slow
def test_a_dead_engine_says_at_which_step_and_that_it_starts_again(script: Any) -> None:
    script.evaluate(READ_VIEWS, [[engines(e0="ready", e1="ready")], *of_engine(life(2)[0], 1)])
    assert script.text_content("#death-1") == ""
    step = script.evaluate("views[1].state.step")
    said = []
    for state in ("dead", "loading", "ready"):
        script.evaluate(READ_VIEWS, [[engines(e0="ready", e1=state)]])
        said.append(script.text_content("#death-1"))
    assert step and all(f"Died after step {step}. " in text for text in said)
    assert "--data-parallel-restart" in said[0] and "being started" in said[1] and "has been started again" in said[2]
    assert script.text_content("#death") == "" and script.is_visible("#death-1")


GO_BACK = f"""batches => {{
  const all = batches.flat().map(line => JSON.parse(line));
  const own = JSON.stringify(({STATE_OF})(views[0].state));
  const read = state => JSON.stringify([({STATE_OF})(state), state.steps.map(s => [s.step, s.ms, s.made, [...s.given], s.waiting, s.gaps])]);
  let count = 0;
  const wrong = [];
  const oracle = new EngineState(live.labels);
  for (const event of all) {{
    oracle.apply(event);
    if (event.name === "sched.output" && read(oracle) !== read(views[0].history.at(count++))) wrong.push(count);
  }}
  return {{ count, wrong, after: views[0].history.at(count), same: own === JSON.stringify(({STATE_OF})(views[0].state)) }};
}}"""


@pytest.mark.slow
def test_going_back_shows_each_step_as_it_was(script: Any) -> None:
    """As the whole story up to it, told to somebody new, and the present stays what it is. More steps than are kept in one piece."""
    batches = life(2)[0] + life(4, "later-")[0]
    script.evaluate(READ_VIEWS, batches)
    back = script.evaluate(GO_BACK, batches)
    assert back["count"] > 64 and back["wrong"] == [] and back["after"] is None and back["same"]
    assert script.evaluate("views[0].history.parts.length") > 1


def test_a_pause_holds_the_picture_and_not_the_engine(script: Any) -> None:
    first, later = life(2)[0], life(4, "later-")[0]
    script.evaluate(READ_VIEWS, first)
    script.evaluate("timeline.tell()")
    script.click("#pause")
    shown = script.evaluate("views[0].shown.step")
    script.evaluate(READ_VIEWS, later)
    assert script.get_attribute("#pictures", "data-step") == str(shown)
    assert not any(row.startswith("later-") for row in script.evaluate(SEEN)[0]["rows"])
    assert script.evaluate("live.requests.size > 0 && [...live.requests.keys()].every(id => id.startsWith('later-'))")
    script.click("#step-back")
    assert script.evaluate("views[0].shown.step") < shown
    assert f"step {script.evaluate('views[0].shown.step')}," in script.text_content("#moment")
    script.click("#pause")
    assert script.evaluate("views[0].shown === live") and script.text_content("#moment") == "live"
