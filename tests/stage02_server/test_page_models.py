"""The page at `/` offers what its server's model can do, and says in words what is wrong when the server cannot be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE
from server_under_test import InProcessServer, ServerProcess

from stage02_server.features.page.routes import build_page

pytest_plugins = ["browser"]  # the fixture of tests/support/browser.py


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def wait_for(page: Any, place: str, words: str) -> None:
    page.locator(place).filter(has_text=words).first.wait_for(timeout=1000 * PATIENCE)


def test_it_says_what_the_model_does() -> None:
    server = InProcessServer()
    assert '<body data-tasks="generate">' in server.request("GET", "/").text
    server.close()


@pytest.mark.slow(keep="classify")
@pytest.mark.parametrize(
    ("tasks", "path", "answer", "shown"),
    [
        ("transcription translation", "/v1/audio/transcriptions", {"text": "To be."}, "To be."),
        (
            "embed token_embed score",
            "/v1/embeddings",
            {"data": [{"embedding": [0.5, 0.25]}]},
            "2 numbers: 0.5000, 0.2500",
        ),
        ("classify score", "/classify", {"data": [{"label": "joy", "probs": [0.75, 0.25]}]}, "class joy"),
    ],
)
def test_a_model_that_writes_no_text_is_asked_for_what_it_makes(
    page: Any, tasks: str, path: str, answer: Any, shown: str
) -> None:
    sent = []

    def serve(route: Any) -> None:
        asked = route.request.url.removeprefix("http://stages.test")
        if asked == path:
            sent.append(route.request)
            route.fulfill(json=answer)
        elif asked == "/":
            route.fulfill(body=build_page()[0].replace("@@TASKS@@", tasks), content_type="text/html")
        else:
            route.fulfill(json={"data": [{"id": "small"}]})

    page.route("**/*", serve)
    page.goto("http://stages.test/")
    page.wait_for_selector("option", state="attached")
    assert page.text_content("#makes").startswith("this model ")
    assert not page.is_visible("[name=kind] >> nth=0") and not page.is_visible("[name=max_tokens]")
    if "transcription" in tasks:
        assert not page.is_visible("[name=prompt]")
        page.set_input_files("[name=file]", {"name": "a.wav", "mimeType": "audio/wav", "buffer": b"RIFF"})
    page.click("#send")
    wait_for(page, ".words", shown)
    assert "stream" not in page.text_content("#curl")
    assert path in page.text_content("#curl") and "small" in page.text_content("#curl")
    if "transcription" in tasks:
        assert b'name="model"\r\n\r\nsmall' in sent[0].post_data_buffer and b"RIFF" in sent[0].post_data_buffer
        assert "-F 'file=@a.wav'" in page.text_content("#curl")


@pytest.mark.slow
def test_a_key_that_is_missing_an_engine_without_scheduler_and_a_server_that_has_ended(page: Any) -> None:
    server = ServerProcess("gpt2-tiny", "--engine", "echo", "--api-key", "secret", "--port", "0")
    try:
        page.goto(server.wait_until_ready() + "/")
        wait_for(page, "#problem", "wants an API key: put it into the field at the top")
        page.fill("#api-key", "secret")
        page.press("#api-key", "Enter")
        wait_for(page, "#live-status", "no scheduler that could be watched; trying again")
        assert page.locator("#pictures.past").count() == 1  # a picture of nothing is not shown as the present
    finally:
        server.close()
    page.press("[name=prompt]", "Control+Enter")
    wait_for(page, "#problem", "no answer from 127.0.0.1")
    assert page.locator(".turn").count() == 0


@pytest.mark.slow
def test_what_has_come_of_a_stopped_answer_stays_in_the_chat(page: Any) -> None:
    server = ServerProcess("gpt2-tiny", "--engine", "echo", "--port", "0")
    try:
        page.goto(server.wait_until_ready() + "/")
        page.wait_for_selector("option", state="attached")
        page.check("[value=chat]")
        page.fill("[name=max_tokens]", "450")
        page.press("[name=prompt]", "Control+Enter")
        wait_for(page, "#summary", "answering")
        page.keyboard.press("Escape")
        wait_for(page, "#summary", "stopped")
        kept = page.evaluate("conversation.map(turn => turn.role)")
        assert kept == ["user", "assistant"]
        assert page.evaluate("conversation[1].content") == page.locator(".words").last.text_content()
    finally:
        server.close()


@pytest.mark.slow
def test_a_page_that_is_opened_while_the_model_loads_gets_its_model(page: Any) -> None:
    answers = [
        {"status": 503, "json": {"error": {"message": "The server is starting."}}},
        {"json": {"data": [{"id": "small"}]}},
    ]

    def serve(route: Any) -> None:
        if route.request.url.endswith("/v1/models"):
            route.fulfill(**answers.pop(0))
        else:
            route.fulfill(body=build_page()[0].replace("@@TASKS@@", "generate"), content_type="text/html")

    page.route("**/*", serve)
    page.goto("http://stages.test/")
    wait_for(page, "#problem", "The server is starting.")
    page.wait_for_selector("option", state="attached")
    page.locator("#problem").wait_for(state="hidden")


def test_reasoning_is_shown_and_is_no_part_of_the_answer(page: Any) -> None:
    deltas = [
        {"role": "assistant"},
        {"reasoning": "Hm, "},
        {"reasoning": "well."},
        {"content": "Yes"},
        {"content": "."},
    ]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def serve(route: Any) -> None:
        if route.request.url.endswith("/chat/completions"):
            route.fulfill(body=stream, content_type="text/event-stream")
        elif route.request.url.endswith("/v1/models"):
            route.fulfill(json={"data": [{"id": "small"}]})
        else:
            route.fulfill(body=build_page()[0].replace("@@TASKS@@", "generate"), content_type="text/html")

    page.route("**/*", serve)
    page.goto("http://stages.test/")
    page.wait_for_selector("option", state="attached")
    page.check("[value=chat]")
    page.click("#send")
    wait_for(page, "#summary", "ended: stop")
    assert page.locator(".turn").last.locator("span").all_text_contents() == ["Hm, well.", "Yes."]
    assert page.evaluate("conversation[1].content") == "Yes."
