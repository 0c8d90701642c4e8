"""The page with real servers: API keys, the clipboard over plain HTTP, many requests at once, and a completion that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opened_page import Opened
from patience import PATIENCE
from server_under_test import ServerProcess

pytest_plugins = ["browser"]  # the fixtures of tests/support/browser.py


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--api-key", "right-key")
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """As the page says that one is started which shows everything."""
    small = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "64", "--max-num-seqs", "8")
    server = ServerProcess("gpt2-tiny", "--port", "0", *small)
    server.wait_until_ready()
    yield server
    server.close()


@pytest.mark.slow
def test_a_key_is_tried_at_once_and_the_right_one_outlives_a_reload(browser: Any, locked: ServerProcess) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(locked.url)
    status, kept = page.locator("#key-status"), "sessionStorage.getItem('api-key')"
    for key, text in (("wrong-key", "refused"), ("right-key", "accepted")):
        page.fill("#api-key", key)
        page.press("#api-key", "Enter")
        status.filter(has_text=text).wait_for(timeout=1000 * PATIENCE)
        assert page.evaluate(kept) == (key if text == "accepted" else None)
        assert page.locator("option").count() == (text == "accepted")
    page.reload()
    page.wait_for_selector("option", state="attached", timeout=1000 * PATIENCE)
    page.fill("#api-key", "wrong-key")
    page.click("#key-form button")
    status.filter(has_text="refused").wait_for(timeout=1000 * PATIENCE)
    assert page.evaluate(kept) is None, "a key that was replaced is forgotten"
    context.close()


def test_the_icon_needs_no_key(locked: ServerProcess) -> None:
    answer = httpx.get(locked.url + "/favicon.ico")
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/svg+xml" and b"<svg" in answer.content


@pytest.mark.slow
def test_copying_works_over_plain_http_or_says_why_not(browser: Any, locked: ServerProcess) -> None:
    """Under the name of another host the browser gives the page no clipboard."""
    context = browser.new_context()
    page = context.new_page()
    text = httpx.get(locked.url).text
    page.route(
        "http://elsewhere.test/**",
        lambda route: (
            route.fulfill(body=text, content_type="text/html")
            if route.request.url.endswith(".test/")
            else route.abort()
        ),
    )
    page.goto("http://elsewhere.test/")
    assert page.evaluate("!isSecureContext && navigator.clipboard === undefined")
    page.click("summary")
    page.click("#copy")
    page.locator("#copied", has_text="copied").wait_for(timeout=1000 * PATIENCE)
    page.fill("[name=prompt]", "")
    curl = page.text_content("#curl")
    page.click("#copy")
    page.focus("[name=prompt]")
    page.keyboard.press("Control+V")
    assert page.input_value("[name=prompt]") == curl != ""
    page.evaluate("document.execCommand = () => false")
    page.click("#copy")
    page.locator("#copied", has_text="plain HTTP").wait_for(timeout=1000 * PATIENCE)
    assert page.evaluate("getSelection().toString()") != ""
    context.close()


@pytest.mark.slow
def test_the_demonstration_shows_all_four(browser: Any, small: ServerProcess) -> None:
    """On the server that the page advises; each sight leads to the step in which it was seen."""
    opened = Opened(browser, small.url + "/")
    opened.until("live.known")
    opened.page.click("#demonstrate")
    opened.until("seen.size === 4 && running === null")
    assert opened.page.text_content("#problem") == opened.page.text_content("#demo-problem") == ""
    assert "8 answers" in opened.page.text_content("#summary")
    opened.page.click("li[data-sight=preemption] button")
    assert opened.page.evaluate("views[0].shown.steps.at(-1).preempted.size") >= 1
    assert opened.page.evaluate("views[0].shown.step < live.step")
    opened.page.click("li[data-sight=batching] button")
    assert opened.page.evaluate("views[0].shown.steps.at(-1).given.size") >= 2
    assert opened.errors == []
    opened.context.close()


@pytest.mark.slow
def test_eight_at_once_run_together_and_have_different_lengths(browser: Any, small: ServerProcess) -> None:
    opened = Opened(browser, small.url + "/")
    opened.until("live.known")
    opened.page.fill("[name=max_tokens]", "16")
    opened.page.click("#send-eight")
    opened.until("running === null && document.getElementById('summary').textContent.includes('8 answers')")
    assert "80 tokens" in opened.page.text_content("#summary")
    assert opened.page.locator("#output .words").count() == 8
    opened.until("live.ended.length === 8 && live.count('running') === 0")
    lengths = opened.page.evaluate("[...live.requests.values()].map(r => [r.prompt, r.tokens - r.prompt])")
    assert len({prompt for prompt, _ in lengths}) == 8 and sorted(output for _, output in lengths) == [
        4,
        4,
        8,
        8,
        12,
        12,
        16,
        16,
    ]
    opened.context.close()


@pytest.mark.slow
def test_a_completion_goes_on_where_it_ended(browser: Any, small: ServerProcess) -> None:
    opened = Opened(browser, small.url + "/")
    assert opened.page.is_disabled("#continue")
    opened.send("To be, or not", temperature="0", max_tokens="6")
    first = opened.answer()
    opened.page.evaluate("document.getElementById('summary').textContent = ''")
    opened.page.click("#continue")
    both = opened.answer()
    assert both.startswith(first) and len(both) > len(first)
    asked = [json.loads(r.post_data)["prompt"] for r in opened.requests if r.url.endswith("/v1/completions")]
    assert asked == ["To be, or not", "To be, or not" + first]
    assert opened.page.locator("#output .turn").count() == 2
    opened.page.click("#clear")
    assert opened.page.is_disabled("#continue")
    opened.context.close()


@pytest.mark.slow(keep="light")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, small: ServerProcess, scheme: str) -> None:
    """Two engines, of which one has died, and answers beside them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    opened = Opened(browser, small.url + "/", color_scheme=scheme)
    opened.send("To be", max_tokens="4")
    opened.answer()
    opened.page.click("summary")
    opened.page.uncheck("#watch")
    opened.page.evaluate("showEngines({0: 'ready', 1: 'ready'}); showEngines({0: 'ready', 1: 'dead'})")
    opened.page.wait_for_selector("#death-1:not(:empty)")
    found = axe.Axe().run(opened.page).response["violations"]
    assert [(one["id"], one["nodes"][0]["target"]) for one in found if one["impact"] in ("serious", "critical")] == []
    opened.context.close()
