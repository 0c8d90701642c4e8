"""Comments in a stream that waits for the model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from server_under_test import InProcessServer, RecordingEcho, events

from stage02_server.__main__ import main
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.keep_alive import COMMENT, KeepAliveMiddleware


def stream_of(gaps: list[bool], commented: asyncio.Event) -> Any:
    """An application that streams a numbered event per entry, at once or when the client has been sent a comment instead."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, is_slow in enumerate(gaps):
            if is_slow:
                commented.clear()
                await commented.wait()
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), max_size=6), st.integers(0, 8))
def test_events_stay_and_comments_fill_the_gaps(gaps: list[bool], taken: int) -> None:
    """A client that leaves early ends the comments too."""
    found: list[bytes] = []
    interval = 0.001 if any(gaps) else 3600.0

    class Gone(Exception):
        pass

    async def read() -> None:
        commented = asyncio.Event()

        async def send(message: Any) -> None:
            if body := message.get("body"):
                found.append(body)
                if body == COMMENT:
                    commented.set()
                elif len(found) > taken:
                    raise Gone

        app = KeepAliveMiddleware(stream_of(gaps, commented), FrontendArgs(sse_keep_alive_interval=interval))
        with suppress(Gone):
            await app({"type": "http", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]
        assert len(asyncio.all_tasks()) == 1  # now, and not when the event loop ends

    asyncio.run(read())
    numbers = [item for item in found if item != COMMENT]
    assert numbers == [b"%d" % number for number in range(len(numbers))]
    if len(found) <= taken:  # read to its end
        assert len(numbers) == len(gaps) and (COMMENT in found) == any(gaps)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_streams_over_http(make_server: Callable[..., InProcessServer], seconds: float) -> None:
    server = make_server(RecordingEcho(tick_seconds=0.2), sse_keep_alive_interval=seconds)
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    for path, body in (("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", chat)):
        text = server.post(path, body | {"max_tokens": 2, "stream": True}).text
        assert (COMMENT.decode() in text) == (seconds > 0)
        chunks: list[Any] = events(text.replace(COMMENT.decode(), ""))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_streams_of_responses(make_server: Callable[..., InProcessServer]) -> None:
    """Of one that is made while its client listens, and of one in the background, whoever follows it."""
    engine = RecordingEcho(tick_seconds=0.2)
    server = make_server(engine, sse_keep_alive_interval=0.01)

    def heard(text: str) -> list[str]:
        assert COMMENT.decode() in text
        return re.findall(r"^event: (.*)$", text.replace(COMMENT.decode(), ""), re.MULTILINE)

    for background in (False, True):
        body = {"input": "ab", "max_output_tokens": 3, "stream": True, "background": background}

        async def follow(body: dict[str, Any] = body) -> tuple[httpx.Response, httpx.Response | None]:
            sent = asyncio.create_task(server.send("POST", "/v1/responses", json=body))
            if not body["background"]:
                return await sent, None
            while not server.engine.num_unfinished_requests:
                await asyncio.sleep(0)
            name = engine.added[-1].partition("-")[0]
            again = await server.send("GET", f"/v1/responses/{name}", params={"stream": True})
            return await sent, again

        first, again = server.run(follow())
        names = heard(first.text)
        assert names[0] == "response.created" and names[-1] == "response.incomplete"
        assert again is None or heard(again.text) == names


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_impossible_intervals(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "gpt2-tiny", "--sse-keep-alive-interval", value]) == 2
    assert "keep" in capsys.readouterr().err
