"""`--otlp-traces-endpoint`: a span for each request, at a collector, while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_collector import Collector, attributes, received
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from patience import PATIENCE, wait_until
from server_under_test import InProcessServer, ServerProcess

from stage02_server.features.otlp import exporter
from stage02_server.features.otlp.exporter import SpanSender
from stage02_server.features.otlp.spans import Caller, FinishedSpan, caller_of
from stagetrace.errors import TraceError
from stagetrace.export.collector import traces_address

ROOT = Path(__file__).parent.parent.parent
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "To be", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def spans_at(collector: Collector, count: int) -> list[Span]:
    wait_until(lambda: len(received(collector.requests)) >= count, "the spans do not come")
    return [span for _, span in received(collector.requests)]


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[ServerProcess, Collector]]:
    """A real engine whose server sends spans."""
    collector = Collector()
    words = ("--kv-cache-memory-bytes", "20000000", "--dtype", "float32", "--otlp-traces-endpoint", collector.url)
    try:
        with closing(ServerProcess("gpt2-tiny", "--port", "0", *words)) as server:
            server.wait_until_ready()
            yield server, collector
    finally:
        collector.close()


def ask(server: ServerProcess, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_request_is_a_span_while_the_server_runs(live: tuple[ServerProcess, Collector]) -> None:
    server, collector = live
    before, first = time.time_ns(), len(received(collector.requests))
    answer = ask(server, "/v1/completions", BODY | {"top_p": 0.5}, traceparent=f"00-{TRACE}-{PARENT}-01").json()
    span = spans_at(collector, first + 1)[-1]
    assert collector.paths == {"/v1/traces"} and received(collector.requests)[-1][0] == "vllm-in-stages"
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    said = attributes(span)
    assert said["gen_ai.request.id"] == answer["id"] + "-0"
    assert said["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert said["gen_ai.usage.completion_tokens"] == 4
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.top_p"]) == (0, 0.5)
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.n"]) == (4, 1)
    assert said["gen_ai.response.finish_reasons"] == ["length"] and said["gen_ai.operation.name"] == "text_completion"
    queued, prefill, decode = (
        said[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    )
    first_token, whole = said["gen_ai.latency.time_to_first_token"], said["gen_ai.latency.e2e"]
    assert 0 < first_token < whole and queued >= 0 and prefill > 0 and decode > 0
    assert queued + prefill == pytest.approx(first_token)
    assert said["gen_ai.latency.time_in_model_inference"] == pytest.approx(prefill + decode)
    assert whole == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-3)


def test_each_prompt_has_one_and_streams_and_chats_too(live: tuple[ServerProcess, Collector]) -> None:
    server, collector = live
    first = len(received(collector.requests))
    ask(server, "/v1/completions", BODY | {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "stream": True})
    ask(
        server,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True},
    )
    found = spans_at(collector, first + 3)[first:]
    said = [attributes(span) for span in found]
    assert [each["gen_ai.usage.completion_tokens"] for each in said] == [8, 8, 3]
    assert [each["gen_ai.request.n"] for each in said] == [2, 2, 1]
    assert said[2]["gen_ai.operation.name"] == "chat"
    assert len({span.trace_id for span in found}) == 3 and not any(span.parent_span_id for span in found)


def test_what_the_caller_does_not_record_is_not_sent(live: tuple[ServerProcess, Collector]) -> None:
    server, collector = live
    first = len(received(collector.requests))
    ask(server, "/v1/completions", BODY, traceparent=f"00-{TRACE}-{PARENT}-00")
    ask(server, "/v1/completions", BODY, traceparent="nonsense")
    [span] = spans_at(collector, first + 1)[first:]
    assert span.trace_id.hex() != TRACE and not span.parent_span_id


def test_what_is_left_is_sent_at_the_end(collector: Collector) -> None:
    """Not even the half second in which spans are gathered passes."""
    patch = "from stage02_server.features.otlp import exporter; exporter.GATHER_SECONDS = 1000"
    words = ("--engine", "echo", "--port", "0", "--otlp-traces-endpoint", f"{collector.url}/own/path")
    with closing(ServerProcess("gpt2-tiny", *words, patch=patch)) as server:
        server.wait_until_ready()
        for _ in range(3):
            ask(server, "/v1/completions", BODY)
        assert not collector.requests
        server.process.terminate()
        assert server.wait() == 0
    assert len(received(collector.requests)) == 3 and collector.paths == {"/own/path"}


def test_a_collector_that_is_down_costs_one_warning_and_no_time(collector: Collector) -> None:
    closed = Collector()
    closed.close()
    words = ("--engine", "echo", "--port", "0", "--otlp-traces-endpoint", closed.url)
    patch = (
        "from stage02_server.features.otlp import exporter; exporter.GATHER_SECONDS = exporter.TIMEOUT_SECONDS = 0.05"
    )
    with closing(ServerProcess("gpt2-tiny", *words, patch=patch)) as server:
        server.wait_until_ready()
        ask(server, "/v1/completions", BODY)
        server.wait_for(f"The collector at {closed.url} does not take the spans, and this is told once: ")
        for _ in range(5):  # whatever of these fails while the server runs, the last ones fail at its end
            ask(server, "/v1/completions", BODY)
        server.process.terminate()
        started = time.monotonic()
        assert server.wait() == 0 and time.monotonic() - started < exporter.END_SECONDS + PATIENCE / 4
    about = [line for line in server.lines if "ollector" in line or "opentelemetry" in line or "Traceback" in line]
    assert len(about) == 1, about


def span(number: int = 0) -> FinishedSpan:
    return FinishedSpan(1, 2, Caller(), {"n": number})


def test_the_queue_is_bounded_and_full_is_told_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "MOST_SPANS", 4)
    monkeypatch.setattr(exporter, "GATHER_SECONDS", 1000)
    sender = SpanSender(collector.url)
    sender.put(span())
    wait_until(sender._queue.empty, "the thread takes none")
    for number in range(10):
        sender.put(span(number))
    sender.close()
    assert [attributes(each)["gen_ai.request.n"] for each in spans_at(collector, 5)] == [0, 0, 1, 2, 3]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [f"4 spans wait for the collector at {collector.url}: others are dropped."]


def test_a_collector_that_comes_back_gets_the_next_ones(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(exporter, "GATHER_SECONDS", 0.01)
    collector.answer = 400
    sender = SpanSender(collector.url)
    try:
        sender.put(span(1))
        wait_until(lambda: "does not take the spans" in caplog.text, "nothing is said")
        collector.answer = 200
        sender.put(span(2))
        assert [attributes(each)["gen_ai.request.n"] for each in spans_at(collector, 1)] == [2]
        wait_until(lambda: "takes spans again" in caplog.text, "nothing is said")
    finally:
        sender.close()


def test_the_event_loop_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "END_SECONDS", 0.0)
    with closing(__import__("socket").create_server(("127.0.0.1", 0))) as mute:  # it accepts, and says nothing
        server = InProcessServer(otlp_traces_endpoint=f"http://127.0.0.1:{mute.getsockname()[1]}")
        try:
            longest = server.run(_longest_turn(server))
        finally:
            server.close()
    assert longest < PATIENCE / 10


async def _longest_turn(server: InProcessServer) -> float:
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            started = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - started)

    watching = asyncio.create_task(watch())
    for _ in range(5):
        assert (await server.send("POST", "/v1/completions", json=BODY)).status_code == 200
    watching.cancel()
    return longest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], (None, None, True)),
        ([f"00-{TRACE}-{PARENT}-01"], (TRACE, PARENT, True)),
        ([f"00-{TRACE}-{PARENT}-00"], (TRACE, PARENT, False)),
        ([f"01-{TRACE}-{PARENT}-03-more"], (TRACE, PARENT, True)),
        ([f"00-{TRACE}-{PARENT}-01"] * 2, (None, None, True)),
        (["x"], (None, None, True)),
    ],
)
def test_what_a_header_says(values: list[str], said: tuple[Any, ...]) -> None:
    caller = caller_of("/", values)
    assert (caller.trace_id, caller.parent_id, caller.sampled) == said


def serve(*words: str, patch: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys\n{patch}\nfrom stage01_cli.main import main\nsys.exit(main(['serve', 'gpt2-tiny', *sys.argv[1:]]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=os.environ | variables, cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip


WITHOUT = """
import stage03_engine.mixins as m
there = m.is_there
m.is_there = lambda name: not name.startswith("opentelemetry") and there(name)
"""


@pytest.mark.slow(keep="variables0")
@pytest.mark.parametrize(
    ("url", "patch", "variables", "said"),
    [
        ("grpc://localhost:4317", "", {}, "otlp_traces_endpoint grpc://localhost:4317: not a collector's address; it looks like"),
        ("localhost:4318", "", {}, "otlp_traces_endpoint localhost:4318: not a collector's address"),
        ("http://a:b", "", {}, "otlp_traces_endpoint http://a:b: not a collector's address ("),
        ("http://a", "", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc', and spans"),
        ("http://a", WITHOUT, {}, "otlp_traces_endpoint needs opentelemetry.sdk.trace, which is not installed: pip install"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["--dry-run", "--port=0"])
def test_what_cannot_send_is_refused_in_one_line(
    how: str, url: str, patch: str, variables: dict[str, str], said: str
) -> None:
    ended = serve(how, "--otlp-traces-endpoint", url, patch=patch, **variables)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("stages: error: ") and said in ended.stderr


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h", ("h", 4318, "http://h:4318/v1/traces")), ("https://h/", ("h", 443, "https://h:443/v1/traces")),
        ("http://[::1]:1/x", ("::1", 1, "http://[::1]:1/x")),
    ],
)  # fmt: skip
def test_addresses(url: str, address: tuple[str, int, str]) -> None:
    assert traces_address(url) == address


@pytest.mark.parametrize("url", ["", "h", "ftp://h", "http://", "http://h:99999", "http://[", "http://h:x"])
def test_no_addresses(url: str) -> None:
    with pytest.raises(TraceError, match="not a collector's address"):
        traces_address(url)


def test_without_the_flag_nothing_of_it_is_loaded() -> None:
    """The web framework may load OpenTelemetry's names; what makes and sends spans it does not."""
    patch = "import atexit; atexit.register(lambda: print('SDK', 'opentelemetry.sdk' in sys.modules, file=sys.stderr))"
    with closing(ServerProcess("gpt2-tiny", "--engine", "echo", "--port", "0", patch=patch)) as server:
        server.wait_until_ready()
        ask(server, "/v1/completions", BODY, traceparent=f"00-{TRACE}-{PARENT}-01")
        server.process.terminate()
        assert server.wait() == 0
    assert server.lines[-1] == "SDK False"
