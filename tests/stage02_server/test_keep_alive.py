"""Comments in a stream that waits for the model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from server_under_test import InProcessServer, RecordingEcho, events

from stage02_server.__main__ import main
from stage02_server.keep_alive import COMMENT, with_keep_alive


async def slowly(gaps: list[bool], commented: asyncio.Event, closed: list[bool]) -> AsyncGenerator[bytes, None]:
    """A numbered event per entry, at once or when the reader has been sent a comment instead."""
    try:
        for number, is_slow in enumerate(gaps):
            if is_slow:
                commented.clear()
                await commented.wait()
            yield b"%d" % number
    finally:
        closed.append(True)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), max_size=6), st.integers(0, 8))
def test_events_stay_and_comments_fill_the_gaps(gaps: list[bool], taken: int) -> None:
    """A reader who leaves early closes the source too."""
    closed: list[bool] = []
    interval = 0.001 if any(gaps) else 3600.0

    async def read() -> list[bytes]:
        commented, found = asyncio.Event(), []
        flow = with_keep_alive(slowly(gaps, commented, closed), interval)
        async for item in flow:
            found.append(item)
            if item == COMMENT:
                commented.set()
            if len(found) > taken:
                break
        await flow.aclose()
        assert closed == [True]  # now, and not when the event loop ends
        return found

    found = asyncio.run(read())
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
