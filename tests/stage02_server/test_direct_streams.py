"""The short way of a streamed token: the same bytes as on the long one, and the long one wherever something could tell the difference."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage02_server.features.direct_streams.direct import DirectStream, direct
from stage02_server.middleware import CONNECTION, RequestIds
from stage02_server.serving_completion import CompletionMaker
from stage02_server.serving_engine import EngineRequests
from stage03_engine.frontend.output_processor import RequestOutputCollector
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import trace

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
TEXT = "To be, or not to be, that is the question"
USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("completions", {}),
    "usage": ("completions", USAGE),
    "usage all along": ("completions", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "stop string": ("completions", {"stop": ["question"]}),
    "logprobs": ("completions", {"logprobs": 2}),
    "interval": ("completions", {"stream_interval": 3}),
    "two answers": ("completions", {"n": 2, "temperature": 1.0}),
    "two prompts": ("completions", {"prompt": [TEXT, "ROMEO:"]}),
    "echo": ("completions", {"echo": True}),
    "chat": ("chat/completions", USAGE),
    "chat with a stop string": ("chat/completions", {"stop": ["question"]}),
    "chat with logprobs": ("chat/completions", {"logprobs": True, "top_logprobs": 2}),
    "one token": ("completions", {"max_tokens": 1}),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    """One with the short way, one without."""
    made = [ServerProcess(*ECHO, *how) for how in ((), ("--no-direct-streams",))]
    try:
        for server in made:
            server.wait_until_ready()
        yield made
    finally:
        for server in made:
            server.close()


def events(server: ServerProcess, path: str, more: dict[str, Any]) -> list[str]:
    """The events of a streamed answer, without what differs from request to request."""
    asked = {"messages": [{"role": "user", "content": TEXT}]} if path.startswith("chat") else {"prompt": TEXT}
    body = {"max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True} | asked | more
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n") if line]
    return [re.sub(r'"(id|created|system_fingerprint)":("[^"]*"|\d+)', "", line) for line in lines]


@pytest.mark.parametrize("name", BODIES)
def test_the_same_stream(servers: list[ServerProcess], name: str) -> None:
    """Text, order, usage and ends are those of the long way. Several flows may interleave differently: each of them is the same."""
    path, more = BODIES[name]
    short, long = (events(server, path, more) for server in servers)
    for index in (0, 1):
        mine, other = ([line for line in each if f'"index":{index}' in line] for each in (short, long))
        assert mine == other
    assert sorted(short) == sorted(long) and short[-1] == long[-1] == "data: [DONE]"


class Transport:
    """A connection whose client reads everything at once, until `unread` or `closing` is set."""

    def __init__(self) -> None:
        self.unread, self.closing = 0, False
        self.pieces: list[bytes] = []

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        size, _, rest = data.partition(b"\r\n")
        assert rest.endswith(b"\r\n") and int(size, 16) == len(rest) - 2
        self.pieces.append(rest[:-2])


def text_of(event: bytes) -> str:
    return json.loads(event.removeprefix(b"data: "))["choices"][0]["text"]


class Request:
    """One request, its maker, and the task that sends what takes the long way."""

    def __init__(self) -> None:
        made = EngineCoreRequest("r-0", [1], SamplingParams(output_kind=RequestOutputKind.DELTA))
        self.maker = CompletionMaker(EngineRequests(RequestIds("r", "r"), "gpt2-tiny", 1, [made]))
        self.transport, self.queue = Transport(), RequestOutputCollector(RequestOutputKind.DELTA)
        self.state = SimpleNamespace(queue=self.queue)
        self.all: list[str] = []  # texts in the order in which they were sent
        self.long: list[str] = []
        self.gate = asyncio.Event()  # the client of the long way reads
        self.gate.set()
        stream = DirectStream(self.maker, self.transport, {"r-0": self.state})  # type: ignore[arg-type, dict-item]
        self.task = asyncio.create_task(self._send(stream.read(self._outputs())))

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        finished = False
        while not finished:
            output = await self.queue.get()
            finished = output.finished
            yield 0, output

    async def _send(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> None:
        async for _, output in outputs:
            await self.gate.wait()
            self.transport.pieces.append(b"".join(self.maker.chunks(0, [output])))
            self.long.append(output.outputs[0].text)

    async def put(self, text: str, finished: bool = False, turns: int = 3) -> None:
        """An output of the engine; then the event loop turns so often."""
        answer = CompletionOutput(0, text, [7], finish_reason="length" if finished else None)
        self.state.queue.put(RequestOutput("r-0", None, [1], [answer], finished))
        for _ in range(turns):
            await asyncio.sleep(0)

    @property
    def sent(self) -> list[str]:
        return [text_of(piece) for piece in self.transport.pieces]


def run(test: Any) -> None:
    async def with_request() -> None:
        request = Request()
        try:
            await test(request)
        finally:
            request.task.cancel()
            await asyncio.gather(request.task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(with_request(), PATIENCE))


def test_the_middle_takes_the_short_way() -> None:
    """The first chunk and the last wake the task; what lies between does not, and counts for the usage."""

    async def test(request: Request) -> None:
        for number in range(5):
            await request.put(str(number), finished=number == 4)
        assert request.sent == list("01234") and request.long == ["0", "4"]
        assert request.maker.requests.num_tokens[0] == 3  # the long way counts in front of `read`
        await request.task

    run(test)


@pytest.mark.parametrize("obstacle", ["unread", "closing", "busy", "trace"])
def test_an_obstacle_sends_it_the_long_way(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the short one is open again when the obstacle is gone. `busy`: the task has not sent what came before."""

    async def test(request: Request) -> None:
        await request.put("0")
        await request.put("1")
        if obstacle == "busy":
            request.gate.clear()
            request.transport.unread = 1
            await request.put("2")
            request.transport.unread = 0
            await request.put("3")
            assert request.sent == list("01")
            request.gate.set()
            await request.put("4", turns=6)
        elif obstacle == "trace":
            monkeypatch.setattr(trace, "on", True)
            await request.put("2")
            monkeypatch.setattr(trace, "on", False)
            await request.put("34")
        else:
            setattr(request.transport, obstacle, 1)
            await request.put("2")
            setattr(request.transport, obstacle, 0)
            await request.put("34")
        assert "".join(request.sent) == "01234" and "2" in "".join(request.long) and "1" not in request.long
        await request.put("5")
        assert request.sent[-1] == "5" and "5" not in "".join(request.long)

    run(test)


def test_outputs_that_come_at_once_keep_their_order() -> None:
    """While the task has yet to wake, later outputs do not overtake."""

    async def test(request: Request) -> None:
        await request.put("0")
        await request.put("1")
        request.transport.unread = 1
        await request.put("2", turns=0)
        request.transport.unread = 0
        await request.put("3", turns=0)
        await request.put("4", turns=6)
        assert "".join(request.sent) == "01234"

    run(test)


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_ends_the_stream_alone(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine, and of what makes the chunks: the task raises it, and `put` does not."""

    async def test(request: Request) -> None:
        await request.put("0")
        if broken:
            monkeypatch.setattr(request.maker, "pieces", lambda *_: 1 / 0)
            await request.put("1")
        else:
            request.state.queue.put(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await request.task

    run(test)


@pytest.mark.parametrize("reason", ["own middleware", "comments", "a layer of a package", "no connection", "HTTP/1.0"])
def test_who_looks_at_chunks_sees_them_all(reason: str) -> None:
    """Then the outputs are left alone."""

    async def test(request: Request) -> None:
        layers = [
            SimpleNamespace(
                cls=type("Layer", (), {"__module__": "other" if "package" in reason else "stage02_server.x"})
            )
        ]
        args = {
            "middleware": ("a.B",) if reason == "own middleware" else (),
            "sse_keep_alive_interval": 1.0 if reason == "comments" else 0.0,
        }
        known = {} if reason == "no connection" else {CONNECTION: {"transport": request.transport}}
        version = "1.0" if reason == "HTTP/1.0" else "1.1"
        scope: Any = {"extensions": known, "app": SimpleNamespace(user_middleware=layers), "http_version": version}
        processor = SimpleNamespace(request_states={})
        serving: Any = SimpleNamespace(
            args=SimpleNamespace(**args), engine_client=SimpleNamespace(output_processor=processor)
        )
        outputs: Any = request._outputs()
        assert direct(serving, request.maker, outputs, scope) is outputs
        scope |= {"extensions": {CONNECTION: {"transport": request.transport}}, "http_version": "1.1"}
        serving.args = SimpleNamespace()
        layers[0].cls.__module__ = "stage02_server.x"
        assert direct(serving, request.maker, outputs, scope) is not outputs

    run(test)


LAYER = """
class Count:
    def __init__(self, app): self.app = app
    async def __call__(self, scope, receive, send):
        async def upper(message):
            if message.get("body"):
                message = message | {"body": message["body"].replace(b"be", b"BE")}
            await send(message)
        await self.app(scope, receive, upper)
"""


def test_a_layer_of_ones_own_may_change_every_chunk(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(LAYER)
    server = ServerProcess(
        *ECHO, "--middleware", "shout.Count", patch=f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    )
    try:
        server.wait_until_ready()
        texts = "".join(events(server, "completions", {}))
        assert texts.count("BE") >= 4 and "be" not in texts.replace("BE", "")
    finally:
        server.close()
