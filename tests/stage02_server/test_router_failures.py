"""The router, whatever its servers do: each way to fail, of each kind of server, with a stream and without. The servers are functions here."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from server_under_test import events

from stage01_cli.main import main
from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.router.app import build_app, warnings
from stage02_server.features.router.command import RouterFlags
from stage02_server.features.router.servers import Servers

PARAMS = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "0" * 16}
CHUNK = {"choices": [{"text": "a"}]}
STREAM = [f"data: {json.dumps(CHUNK)}\n\n".encode(), b"data: [DONE]\n\n"]
URLS = {"prefill": ("http://p0", "http://p1"), "decode": ("http://d0", "http://d1")}


class Stream(httpx.AsyncByteStream):
    """Pieces, and then perhaps an end that is none."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self._pieces, self._error = pieces, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await asyncio.sleep(0)
            yield piece
        if self._error is not None:
            raise self._error


def raising(error: Exception) -> Callable[[bool], httpx.Response]:
    def fail(stream: bool) -> httpx.Response:
        raise error

    return fail


def saying(status: int, content: bytes = b'{"error": {"message": "no"}}') -> Callable[[bool], httpx.Response]:
    return lambda stream: httpx.Response(
        status, headers={"content-type": "application/json", "x-own": "secret"}, stream=Stream([content])
    )


def breaking(pieces: int) -> Callable[[bool], httpx.Response]:
    return lambda stream: httpx.Response(
        200, headers={"content-type": "text/event-stream"}, stream=Stream(STREAM[:pieces], httpx.ReadError("cut"))
    )


BREAKS = {
    "refuses": raising(httpx.ConnectError("no")), "is not reached": raising(httpx.ConnectTimeout("no")), "is silent": raising(httpx.ReadTimeout("no")),
    "closes": raising(httpx.RemoteProtocolError("no")), "speaks nonsense": raising(httpx.LocalProtocolError("no")), "resets": raising(OSError("no")),
    "ends in the middle": breaking(0),
}  # fmt: skip
DEATHS = {"closes", "speaks nonsense", "resets", "ends in the middle"}
"""Those after which nobody knows what the request did."""
SAYS = {f"says {status}": saying(status) for status in (302, 400, 401, 404, 413, 429, 500, 503)}
OF_PREFILL = (
    BREAKS | SAYS | {"says nonsense": saying(200, b"["), "keeps nothing": saying(200, b'{"kv_transfer_params": null}')}
)


def right(is_prefill: bool, stream: bool) -> httpx.Response:
    if stream:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Stream(STREAM))
    body = {"kv_transfer_params": PARAMS} if is_prefill else CHUNK
    return httpx.Response(200, headers={"content-type": "application/json"}, stream=Stream([json.dumps(body).encode()]))


class Fleet:
    """Servers that are functions. `fails` says which does what instead of what is right; one that breaks for good is down from then on."""

    def __init__(self, fails: dict[str, Callable[[bool], httpx.Response]], for_good: bool = True) -> None:
        self.fails, self.for_good = fails, for_good
        self.asked: list[tuple[str, dict[str, Any], httpx.Headers]] = []
        self.down: set[str] = set()
        self.servers = Servers(*URLS.values(), timeout=PATIENCE)
        self.servers.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), timeout=PATIENCE)
        self.app = build_app(self.servers, RouterFlags(**URLS, max_concurrent_requests=8), HardeningFlags())

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if request.method == "GET":
            return httpx.Response(503 if name in self.down else 200)
        body = json.loads(await request.aread())
        self.asked.append((name, body, request.headers))
        if (fail := self.fails.get(name)) is None:
            return right(name[0] == "p" and "kv_transfer_params" in body, body.get("stream", False))
        if self.for_good and fail in BREAKS.values():
            self.down.add(name)
        return fail(body.get("stream", False))

    def ask(self, stream: bool = False, headers: Any = None, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            await asyncio.gather(*map(self.servers.look, self.servers.all))
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=PATIENCE) as client:
                body = {"prompt": "a", "stream": stream, "max_tokens": 9} | more
                sent = headers or {"Authorization": "Bearer k", "Cookie": "c", "X-Request-Id": "r"}
                return await client.post("/v1/completions", json=body, headers=sent)

        answer = asyncio.run(ask())
        assert not any(server.busy for server in self.servers.all)
        return answer

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.asked]


def is_right(answer: httpx.Response, stream: bool) -> bool:
    return answer.status_code == 200 and (events(answer.text) == [CHUNK] if stream else answer.json() == CHUNK)


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_told_what(stream: bool) -> None:
    """The prompt to one, the rest to the other; and of the headers only what they need."""
    fleet = Fleet({})
    more = {
        "max_completion_tokens": 5,
        "min_tokens": 3,
        "n": 1,
        "stop": ["x"],
        "stream_options": None,
        "guided_regex": "a",
        "logprobs": 1,
        "top_k": 3,
    }
    answer = fleet.ask(stream, **more)
    (prefill, first, _), (decode, second, headers) = fleet.asked
    assert is_right(answer, stream) and (prefill, decode) == ("p0", "d0")
    kept = {"prompt": "a", "top_k": 3, "max_tokens": 1, "min_tokens": 0, "n": 1}
    assert first.pop("kv_transfer_params")["do_remote_decode"] is True and first == kept
    assert second == {"prompt": "a", "stream": stream, "max_tokens": 9, "kv_transfer_params": PARAMS} | more
    assert [headers[name] for name in ("authorization", "x-request-id", "accept-encoding")] == [
        "Bearer k",
        "r",
        "identity",
    ]
    assert "cookie" not in headers and headers["traceparent"].startswith("00-")


ALONE = [
    {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": "a", "prompt_logprobs": 1}, {"prompt": "a", "prompt_logprobs": 0}, {"prompt": "a", "use_beam_search": True},
    {"prompt": "a", "echo": True, "logprobs": 1}, {"prompt": "a", "echo": True, "logprobs": 0}, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, {"prompt": [{}, 1]},
]  # fmt: skip
TOGETHER = [
    {"prompt": ["a"]}, {"prompt": [1, 2, 3]}, {"prompt": [[1, 2]]}, {"prompt": "[\"a\", \"b\"]"}, {"prompt": "a", "echo": True}, {"prompt": None}, {"n": 3},
    {"messages": [{"role": "user", "content": 'he wrote "image_url" here'}]},
]  # fmt: skip


@pytest.mark.parametrize("more", [*ALONE, *TOGETHER], ids=str)
def test_what_a_prefill_server_is_not_asked_for(more: dict[str, Any]) -> None:
    fleet = Fleet({})
    assert is_right(fleet.ask(**more), False)
    assert fleet.names == (["d0"] if more in ALONE else ["p0", "d0"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", OF_PREFILL)
@pytest.mark.parametrize("both", [False, True])
def test_whatever_a_prefill_server_does_the_answer_is_whole(how: str, both: bool, stream: bool) -> None:
    """Another prefill server computes the prompt, or the decode server does. Only what two servers die of is not tried once more."""
    fleet = Fleet(dict.fromkeys(["p0", "p1"] if both else ["p0"], OF_PREFILL[how]))
    answer = fleet.ask(stream)
    if both and how in DEATHS:
        assert (answer.status_code, fleet.names) == (503, ["p0", "p1"])
        return
    assert is_right(answer, stream)
    another = how in BREAKS or how == "says 503"
    assert fleet.names == (["p0", "p1", "d0"] if another else ["p0", "d0"])
    assert ("kv_transfer_params" in fleet.asked[-1][1]) is (another and not both)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("how", BREAKS)
def test_a_decode_server_that_is_gone_costs_time(how: str, for_good: bool, stream: bool) -> None:
    """Another one answers, or the same one if only the connection broke."""
    fleet = Fleet({"d0": BREAKS[how]}, for_good)
    assert is_right(fleet.ask(stream), stream)
    assert fleet.names.count("d0") == 1 and fleet.names[-1] == "d1"
    assert len([name for name in fleet.names if name[0] == "p"]) == 1 + (how in DEATHS), (
        "who died may have taken the blocks"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", BREAKS)
def test_without_a_decode_server_a_prefill_server_does_all(how: str, stream: bool) -> None:
    fleet = Fleet(dict.fromkeys(["d0", "d1"], BREAKS[how]))
    answer = fleet.ask(stream)
    if how in DEATHS:  # it may be the request that kills them
        assert answer.status_code == 503 and fleet.names.count("d0") + fleet.names.count("d1") == 2
        answer = fleet.ask(stream)
    assert is_right(answer, stream) and fleet.names[-1][0] == "p" and "kv_transfer_params" not in fleet.asked[-1][1]


@pytest.mark.parametrize("how", BREAKS)
def test_everything_breaks_and_the_router_says_so(how: str) -> None:
    for for_good in (True, False):
        fleet = Fleet(dict.fromkeys(["p0", "p1", "d0", "d1"], BREAKS[how]), for_good)
        answer = fleet.ask()
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert len(fleet.asked) < 30


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", SAYS)
def test_what_a_decode_server_says_is_what_the_client_hears(how: str, stream: bool) -> None:
    """But for a 503, which another one may know better; and no header that is not for clients."""
    fleet = Fleet({"d0": SAYS[how]})
    answer = fleet.ask(stream)
    if how == "says 503":
        assert is_right(answer, stream) and fleet.names == ["p0", "d0", "d1"]
        fleet = Fleet(dict.fromkeys(["d0", "d1"], SAYS[how]))
        answer = fleet.ask(stream)
    assert (f"says {answer.status_code}", answer.json()) == (
        how,
        {"error": {"message": "no"}},
    ) and "x-own" not in answer.headers


def test_a_stream_that_had_begun_ends_with_an_error() -> None:
    fleet = Fleet({"d0": breaking(1)})
    *chunks, last = events(fleet.ask(True).text)
    assert chunks == [CHUNK] and last["error"]["code"] == 503 and fleet.names == ["p0", "d0"]


def test_a_header_that_is_no_ascii_passes() -> None:
    """As do two ids that no server would accept: the router makes its own."""
    fleet = Fleet({})
    odd = {
        "User-Agent": b"\xff\xfe",
        "X-Request-Id": b"\xff",
        "traceparent": b"00-" + b"\xff" * 32 + b"-1-1",
        "Authorization": "Bearer \u00e9".encode("latin-1"),
    }
    assert is_right(fleet.ask(headers=odd), False)
    _, _, headers = fleet.asked[-1]
    raw = {name.lower(): value for name, value in headers.raw}
    assert raw[b"user-agent"] == b"\xff\xfe" and raw[b"authorization"] == b"Bearer \xe9"
    assert len(raw[b"x-request-id"]) == 32 and raw[b"traceparent"].isascii()


def test_they_take_turns() -> None:
    fleet = Fleet({})
    for _ in range(4):
        assert fleet.ask().status_code == 200
    assert fleet.names == ["p0", "d0", "p1", "d1"] * 2


def test_who_comes_back_gets_requests_again() -> None:
    """Nobody is forgotten: a server that was away is looked at until it is there."""
    fleet = Fleet({})
    fleet.down |= {"p0", "p1", "d0", "d1"}

    async def come_back() -> None:
        watching = asyncio.create_task(fleet.servers.watch(0.001))
        for name in ("d0", "p1"):
            fleet.down.discard(name)
            async with asyncio.timeout(PATIENCE):
                while fleet.servers.choose("decode" if name == "d0" else "prefill") is None:
                    await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    assert fleet.ask().status_code == 503 and not fleet.asked
    asyncio.run(come_back())
    assert is_right(fleet.ask(), False) and fleet.names == ["p1", "d0"]


@pytest.mark.parametrize("role", ["p", "d"])
def test_no_more_than_so_many_are_in_progress(role: str) -> None:
    """One more gets a 429 at once; and when clients leave, their places are free and their servers have nothing to do."""
    fleet, at_work = Fleet({}), 0

    async def stand_still(request: httpx.Request) -> httpx.Response:
        nonlocal at_work
        if request.method == "POST" and request.url.host[0] == role:
            at_work += 1
            await asyncio.Event().wait()
        return await fleet._answer(request)

    async def fill() -> None:
        await asyncio.gather(*map(fleet.servers.look, fleet.servers.all))
        fleet.servers.client = httpx.AsyncClient(transport=httpx.MockTransport(stand_still), timeout=PATIENCE)
        messages = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]
        left, sent = asyncio.Event(), list[int]()

        async def ask() -> None:
            waiting = list(messages)

            async def receive() -> dict[str, Any]:
                if waiting:
                    return waiting.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.extend([message["status"]] if "status" in message else [])

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/completions",
                "headers": [],
                "query_string": b"",
                "http_version": "1.1",
            }
            await fleet.app(scope, receive, send)

        clients = [asyncio.create_task(ask()) for _ in range(8)]
        async with asyncio.timeout(PATIENCE):
            while at_work < 8:
                await asyncio.sleep(0)
            await ask()
            assert sent == [429]
            left.set()
            await asyncio.gather(*clients)
        assert not any(server.busy for server in fleet.servers.all) and sent == [429]

    asyncio.run(fill())


WRONG = [
    ([], "--prefill"), (["--prefill", "http://a"], "--decode"), (["--prefill", "a", "--decode", "http://b"], "--prefill takes addresses"),
    (["--prefill", "http://a", "http://a/", "--decode", "http://b"], "twice"), (["--prefill", "http://a", "--decode", "http://k@b"], "--decode takes"),
    (["--prefill", "http://a", "--decode", "http://b?x"], "--decode takes"), (["--prefill", "http://a", "--decode", "http://b:x"], "--decode takes"),
    (["--prefill", "ftp://a", "--decode", "http://b"], "--prefill takes"), (["--prefill", "http://a b", "--decode", "http://b"], "--prefill takes"),
    (["--prefill", "http://xn--a:1", "--decode", "http://b"], "--prefill takes"),
    (["--prefill", "http://a", "--decode", "http://b", "--port", "70000"], "port"), (["--prefill", "http://a", "--decode", "http://b", "--port", "x"], "port"),
    (["--prefill", "http://a", "--decode", "http://b", "--max-request-bytes", "1"], "max_request_bytes"), (["--prefil", "http://a"], "unknown flag"),
    (["--prefill", "http://a", "--decode", "http://b", "--health-check-interval-secs", "0"], "health_check_interval_secs"),
    (["--prefill", "http://a", "--decode", "http://b", "--trace", "/dev/null/x"], "cannot write traces"),
    (["--prefill", "http://a", "--decode", "http://b", "--host", "192.0.2.1"], "this machine has no address"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG, ids=str)
def test_what_cannot_be_is_said_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stages: error: ")]
    assert len(lines) == 1 and says in lines[0]


def test_who_may_use_it_is_said_at_the_start() -> None:
    """If nothing keeps anybody out."""
    opened, closed = HardeningFlags(), HardeningFlags(api_key=("k",))
    for host, limits, says in ((None, opened, 1), ("::", opened, 1), ("127.0.0.1", opened, 0), (None, closed, 0)):
        assert len(warnings(RouterFlags(**URLS, host=host), limits)) == says


def test_a_taken_port_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert (
            main(["router", "--prefill", "http://a", "--decode", "http://b", "--host", "127.0.0.1", "--port", port])
            == 2
        )
    assert f"port {port} is taken" in capsys.readouterr().err
