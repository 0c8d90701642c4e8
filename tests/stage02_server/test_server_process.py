"""The server as a process of its own: start, real clients, signals, exit codes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from echo_engine_process import PATCH
from server_under_test import DYING_ENGINE, ServerProcess, rest

from stage02_server.__main__ import main
from stage02_server.api_server import create_server_socket
from stagetrace import VOCABULARY, read_run

ECHO = ("gpt2-tiny", "--engine", "echo", "--port", "0")
StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def echo() -> Iterator[ServerProcess]:
    server = ServerProcess(*ECHO)
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(echo: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "gpt2-tiny" and client.models.retrieve("gpt2-tiny") == model


def test_openai_client_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="gpt2-tiny", prompt="To be, or not", max_tokens=7, logprobs=1)
    assert whole.choices[0].text == "To be, or notTo be" and whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.tokens[:2] == ["To", " be"]
    assert whole.usage and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 7)
    stream = client.completions.create(
        model="gpt2-tiny", prompt="To be, or not", max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_openai_client_chat(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "To be"}]
    whole = client.chat.completions.create(model="gpt2-tiny", messages=ask, max_tokens=4, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", "To beTo be")
    assert whole.choices[0].logprobs and len(whole.choices[0].logprobs.content or []) == 4
    chunks = list(client.chat.completions.create(model="gpt2-tiny", messages=ask, max_tokens=4, stream=True))  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[0].choices[0].delta.role == "assistant"


def test_openai_client_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="unknown", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="gpt2-tiny", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens" and refused.value.type == "BadRequestError"
    with pytest.raises(openai.BadRequestError):
        list(client.completions.create(model="gpt2-tiny", prompt="x " * 2000, stream=True))


def test_the_api_process_is_small_and_has_no_torch(echo: ServerProcess, client: openai.OpenAI) -> None:
    client.completions.create(model="gpt2-tiny", prompt="x", logprobs=1)
    httpx.get(f"{echo.url}/openapi.json")
    process = psutil.Process(echo.process.pid)
    assert process.memory_info().rss < 150e6
    libraries = {Path(region.path).name for region in process.memory_maps()}
    assert any("tokenizers" in name for name in libraries)
    assert not any(name.startswith("libtorch") for name in libraries)


def stream_lines(url: str, max_tokens: int) -> Iterator[str]:
    body = {"prompt": "a b c d", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        yield from (line for line in response.iter_lines() if line)


def test_sigterm_finishes_what_runs_and_exits_with_0(start_server: StartServer) -> None:
    server = start_server(*ECHO)
    url = server.wait_until_ready()
    lines = stream_lines(url, max_tokens=400)
    next(lines)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("SIGTERM: finishing 1 requests")
    *_, last, done = lines
    assert '"finish_reason":"length"' in last and done == "data: [DONE]"
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    modules = set(server.process.stdout.read().split())  # type: ignore[union-attr]
    assert "fastapi" in modules
    assert not modules & {"torch", "transformers", "numpy", "huggingface_hub", "openai"}
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.slow(keep="limit")
@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_a_request_that_takes_too_long_is_cut(start_server: StartServer, how: str) -> None:
    slow = (
        "import stage02_server.features.echo_engine.echo_engine as e; e.EchoCoreClient.__init__.__defaults__ = (0.5,)"
    )
    server = start_server(*ECHO, "--shutdown-timeout", "1" if how == "limit" else "1000", patch=slow)
    lines = stream_lines(server.wait_until_ready(), max_tokens=400)
    next(lines)
    server.process.send_signal(signal.SIGINT)
    server.wait_for("SIGINT: finishing 1 requests")
    if how == "second signal":
        server.process.send_signal(signal.SIGTERM)
    *_, last, done = lines
    assert '"code": 503' in last and done == "data: [DONE]"
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)


def test_a_dead_engine_ends_the_server_with_1(start_server: StartServer) -> None:
    server = start_server(*ECHO, patch=DYING_ENGINE)
    url = server.wait_until_ready()
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
    assert httpx.get(f"{url}/health").status_code == 503
    assert server.wait() == 1


def _listening() -> socket.socket:
    other = socket.create_server(("", 0))  # with SO_REUSEADDR, as most servers
    assert other.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    return other


def _still_loading() -> socket.socket:
    return create_server_socket("", 0)  # what another server of ours holds before it listens


@pytest.mark.parametrize("other", [_listening, _still_loading])
def test_a_taken_port_is_one_line_and_exit_code_2(
    other: Callable[[], socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    with other() as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", *ECHO[:-1], port]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert port in line and "--port" in line


ENGINES = ("gpt2-tiny", "--host", "127.0.0.1", "-dp", "2", "--port", "0")
ROUTER = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1/x", "--host", "127.0.0.1", "--port", "0")
AS_A_ROUTER = {"command": "stage01_cli.main", "subcommand": "router"}


@pytest.mark.slow(keep="one")
@pytest.mark.parametrize(
    ("flags", "how"),
    [(ECHO, {}), (("-asc", "2", *ECHO), {}), (ENGINES, {"patch": PATCH}), (ROUTER, AS_A_ROUTER)],
    ids=["one", "several API servers", "several engines", "a router"],
)
def test_the_next_server_may_have_the_port_at_once(
    start_server: StartServer, flags: tuple[str, ...], how: dict[str, str]
) -> None:
    """Also when the old one has closed connections whose clients still hold them: the system then remembers the port for a minute. And
    meanwhile no other server may have it."""
    port, times = "0", 2
    for number in range(times):
        server = start_server(*flags[:-1], port, **how)
        url = httpx.URL(server.wait_until_routing() if flags is ROUTER else server.wait_until_ready())
        assert port in ("0", str(url.port))
        port = str(url.port)
        with ExitStack() as clients:
            for _ in range(4):
                client = clients.enter_context(socket.create_connection((url.host, url.port)))
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert rest(client).startswith(b"HTTP/1.1 200")  # what is not read would end the connection at once
            if number == times - 1:
                second = start_server(*flags[:-1], port, **how)
                assert second.wait() == 2 and port in second.lines[-1]
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0


@pytest.mark.parametrize(("flag", "value"), [("--host", "no-such-host.invalid"), ("--host", "203.0.113.7")])
def test_an_impossible_address_is_one_line_and_exit_code_2(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *ECHO, flag, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert value in line and flag in line


def test_sigterm_while_the_engine_loads_exits_with_0(start_server: StartServer) -> None:
    never = """
import asyncio
from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
async def start(self):
    import logging; logging.getLogger().info("now loading")
    await asyncio.Event().wait()
EchoCoreClient.start = start
"""
    server = start_server(*ECHO, patch=never)
    server.wait_for("now loading")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.slow
def test_the_trace_tells_start_request_and_stop_in_order(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(*ECHO, "--trace", str(tmp_path))
    url = server.wait_until_ready()
    list(stream_lines(url, max_tokens=3))
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert httpx.post(f"{url}/v1/completions", json={"prompt": [[]]}).status_code == 400
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    run = read_run(tmp_path)
    mine = [event for event in run.events if VOCABULARY[event.name].stage == "stage02_server"]
    for event in mine:
        assert set(event.args) == set(VOCABULARY[event.name].args), event
    start = [
        "serve.model_tag",
        "serve.decision",
        "server.socket_bound",
        "server.engine_config",
        "server.app_built",
        "server.state_ready",
        "server.state",
        "server.listening",
        "server.state",
    ]
    streamed = ["http.request", "request.validated", "request.sampling_params", *["sse.chunk"] * 4]
    chat = [
        "http.request", "request.validated", "tokenizer.requested", "request.templated", "request.sampling_params",
        "http.response",
    ]  # fmt: skip
    refused = ["http.request", "request.validated", "request.sampling_params", "request.refused", "http.response"]
    stop = ["server.draining", "server.state", "server.state", "server.stopped"]
    assert [event.name for event in mine] == [*start, *streamed, *chat, *refused, *stop]
    states = [event.args["state"] for event in mine if event.name == "server.state"]
    assert states == ["starting", "ready", "draining", "stopped"]
    (chat_id,) = {event.req for event in mine[16:22]}
    assert chat_id == f"{answer['id']}-0"
    assert "generate.start" in {event.name for event in run.of_request(chat_id)}  # the engine knows it by the same name


@pytest.mark.slow
def test_without_uvloop_it_serves_on_asyncio(start_server: StartServer) -> None:
    server = start_server(*ECHO, patch="import sys; sys.modules['uvloop'] = None")
    *_, last, done = stream_lines(server.wait_until_ready(), max_tokens=4)
    assert '"finish_reason":"length"' in last and done == "data: [DONE]"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines)


SPAWN = """
import subprocess
popen = subprocess.Popen.__init__
def spawn(self, args, *more, **how):
    web = [name for name in ("fastapi", "starlette", "uvicorn", "pydantic") if name in sys.modules]
    print(f"spawns {args[2]} with {web}", file=sys.stderr, flush=True)
    popen(self, args, *more, **how)
subprocess.Popen.__init__ = spawn
"""


@pytest.mark.slow
def test_the_engine_starts_before_the_web_framework_is_imported() -> None:
    """Both take a second or so: at the same time, if the engine's process comes first."""
    server = ServerProcess("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", patch="import sys\n" + SPAWN)
    try:
        assert server.wait_for(r"spawns stage03_engine\.core\S* with (.*)")[1] == "[]"
    finally:
        server.close()
