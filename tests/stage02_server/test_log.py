"""The log of a server: who speaks, what it was started with, when it is ready, and what it does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage02_server.__main__ import make_parser
from stage02_server.cli_args import resolve_serve_args
from stage02_server.features.hardening.log_limit import LogLimit
from stage02_server.features.page.link import link_to
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.features.terminal_log.terminal_log import TerminalFormatter
from stage03_engine.args.log import configure_logging
from stage03_engine.config import ObservabilityConfig
from stage03_engine.frontend.features.logging_stats.logging_stats import LoggingStatLogger
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.messages import SchedulerStats

FLAGS = (
    "--load-format",
    "dummy",
    "--host",
    "127.0.0.1",
    "--port",
    "0",
    "--num-gpu-blocks-override",
    "65",
    "--no-node-secret-required",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("gpt2", *FLAGS, "--api-key", "sk-secret", "--log-stats-interval", "0.5")
    server.wait_until_ready()
    yield server
    server.close()


def the_line(server: ServerProcess, pattern: str) -> re.Match[str]:
    [found] = [match for line in server.lines if (match := re.search(pattern, line))]
    return found


@pytest.mark.slow
def test_each_line_says_which_process_speaks(server: ServerProcess) -> None:
    who = [
        re.match(r"\((APIServer|EngineCore_DP0) pid=(\d+)\) (INFO|WARNING) \d\d-\d\d ", line) for line in server.lines
    ]
    assert all(who), server.lines
    by_process = {match[1]: int(match[2]) for match in who if match}
    assert by_process["APIServer"] == server.process.pid and by_process["EngineCore_DP0"] != server.process.pid


def test_it_says_version_settings_and_when_it_is_ready(server: ServerProcess) -> None:
    assert the_line(server, r"vLLM in stages (\d\S*), model gpt2$")
    settings = the_line(server, r"Settings: (.*)$")[1]
    assert {"load_format=dummy", "num_gpu_blocks_override=65", "port=0", "api_key=***"} <= set(settings.split(", "))
    assert "node_secret_required=False" in settings, "a switch hides nothing"
    assert "sk-secret" not in "".join(server.lines) and "block_size" not in settings
    assert the_line(server, r"EngineCore.* Ready after \d+\.\d s, with a KV cache for 1024 tokens$")
    assert the_line(server, r"APIServer.* Ready after \d+\.\d s\. Serving gpt2 on ")


def test_its_last_line_is_a_link(server: ServerProcess) -> None:
    port = httpx.URL(server.url).port
    assert server.wait_for(r"Open (\S+)$")[1] == f"http://localhost:{port}/"
    (ready, last) = [line for line in server.lines if re.search(r"Serving gpt2 on|Open http", line)]
    assert server.lines.index(last) == server.lines.index(ready) + 1 and httpx.get(server.url + "/").status_code == 200


@pytest.mark.parametrize(
    ("address", "link"),
    [
        ("http://0.0.0.0:8000", "http://localhost:8000/"),
        ("https://[::]:8443", "https://localhost:8443/"),
        ("http://127.0.0.1:1", "http://localhost:1/"),
        ("http://[::1]:8000", "http://[::1]:8000/"),
        ("http://192.168.0.7:8000", "http://192.168.0.7:8000/"),
        ("unix:/tmp/x", None),
    ],
)
def test_a_link_can_be_opened_on_this_machine(address: str, link: str | None) -> None:
    assert link_to(address) == link


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ([], True),
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "127.0.0.1"], False),
        (["--host", "192.168.0.7"], False),
        (["--api-key", "sk-secret"], False),
        (["--uds", "/tmp/x"], False),
    ],
)
def test_who_listens_everywhere_without_a_key_is_warned(words: list[str], warns: bool) -> None:
    args = resolve_serve_args(make_parser("serve").parse_args(["serve", "gpt2-tiny", *words])).frontend_args
    assert bool(args.warnings()) is warns and not any("sk-secret" in each for each in args.warnings())


def test_the_warning_is_in_the_log() -> None:
    with contextlib.closing(ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo")) as everywhere:
        everywhere.wait_for("WARNING.*listens on all interfaces")
        assert everywhere.wait_for(r"Open (\S+)$")[1].startswith("http://localhost:")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_a_line_begins_briefly_and_breaks_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    formatter = TerminalFormatter("APIServer", screen)
    words = [f"word{number}" for number in range(30)]
    record = logging.LogRecord("a", logging.INFO, "some/file.py", 7, " ".join(words), (), None)
    first, *more = formatter.format(record).split("\n")
    assert (
        re.match(r"\d\d:\d\d:\d\d \[APIServer\] word0 word1 ", first) and more and max(map(len, [first, *more])) <= 80
    )
    assert all(line.startswith("    word") for line in more)
    assert " ".join([first, *more]).split()[2:] == words
    record.levelno, record.levelname = logging.WARNING, "WARNING"
    assert formatter.format(record).split()[2:4] == ["WARNING", "word0"]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[33mWARNING" in formatter.format(record)


def test_only_a_terminal_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, brief in ((Screen(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        set_up = Mock()
        monkeypatch.setattr(logging, "basicConfig", set_up)
        monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
        configure_logging("APIServer", ObservabilityConfig(log_level="INFO"))
        [handler] = set_up.call_args.kwargs["handlers"]
        assert isinstance(handler.formatter, TerminalFormatter) is brief


def test_no_client_writes_a_line_or_steers_the_terminal(server: ServerProcess) -> None:
    """Nor does one name another client as the sender: nobody is believed, this machine's other programs neither."""
    url = httpx.URL(server.url)
    target = "/odd%0aforged%1b[31m%c2%9b%e2%80%ae?a=%0a"
    forged = '6.6.6.6:1 - "GET /forged HTTP/1.1" 200\x9b'
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as client:
        text = f"GET {target} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {forged}\r\nConnection: close\r\n\r\n"
        client.sendall(text.encode("latin-1"))
        assert client.recv(99).startswith(b"HTTP/1.1 401")
    server.wait_for(r"127\.0\.0\.1:\d+ - \"GET /odd\S+ HTTP/1\.1\" 401$")
    assert all(line.isprintable() for line in server.lines) and not any("6.6.6.6" in line for line in server.lines)


def test_whatever_a_record_quotes_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file of the user's own sets the log up; and each line of a traceback is indented."""
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    configure_logging("APIServer", ObservabilityConfig(configure_logging=False))
    stream, odd = io.StringIO(), "x\r\n\x1b[2J\x9b\u2028\u202e\ud800\x7f"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("LINE %(message)s"))
    logger = logging.Logger("of.a.test")
    logger.addHandler(handler)
    logger.warning("a %s, %s", odd, [odd])
    try:
        raise ValueError(odd + "\nLINE forged")
    except ValueError:
        logger.exception("Exception in ASGI application\n")
    first, second, *traceback = stream.getvalue().splitlines()
    assert first.startswith("LINE a x\\r\\n\\x1b[2J\\x9b\\u2028\\u202e\\ud800\\x7f, [") and first.isprintable()
    assert second == "LINE Exception in ASGI application" and any("ValueError: x" in line for line in traceback)
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)


def test_random_weights_and_a_stand_in_tokenizer_are_one_warning(server: ServerProcess) -> None:
    [warning] = [line for line in server.lines if "WARNING" in line]
    assert "weights are random" in warning and "tokenizer is a stand-in" in warning


def test_statistics_come_while_there_is_work(server: ServerProcess) -> None:
    """In the end a line says that nobody runs; then there is silence until the next request."""
    ask = {"prompt": "x" * 40, "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        key = {"Authorization": "Bearer sk-secret"}
        assert httpx.post(server.url + "/v1/completions", json=ask, headers=key).status_code == 200
        server.wait_for(
            r"Engine 000: Avg prompt throughput: [1-9]\d*\.\d tokens/s, Avg generation throughput: [1-9]\d*\.\d tokens/s, "
            r"Running: \d+ reqs, Waiting: \d+ reqs, KV cache usage: \d+\.\d%, Prefix cache hit rate: \d+\.\d%"
        )
        server.wait_for(r"prompt throughput: 0\.0 .*generation throughput: 0\.0 .*Running: 0 reqs, Waiting: 0 reqs")


class Clock:
    """The timer of an event loop, wound by hand."""

    def __init__(self) -> None:
        self.due: list[Callable[[], Any]] = []

    def call_later(self, seconds: float, callback: Callable[[], Any]) -> object:
        assert seconds == 10
        self.due.append(callback)
        return self

    def tick(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


def test_a_burst_is_told_at_its_own_rate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However long nothing ran before, the tokens are shared out over the interval that began with them."""
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    caplog.set_level("INFO")
    stats = LoggingStatLogger(EngineArgs.from_kwargs(model="gpt2-tiny"))
    stats.record(SchedulerStats(), IterationStats())  # an idle engine says so too
    assert not clock.due
    running = SchedulerStats(
        num_running=2, num_waiting=1, kv_cache_usage=0.25, prefix_cache_queries=100, prefix_cache_hits=50
    )
    for _ in range(100):
        stats.record(running, IterationStats(num_prompt_tokens=1, num_generation_tokens=16))
    assert len(clock.due) == 1
    for line in (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 160.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, "
        "KV cache usage: 25.0%, Prefix cache hit rate: 50.0%",
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 2 reqs",
    ):
        clock.tick()
        assert line in caplog.messages[-1] and len(clock.due) == 1  # a step that takes longer is work too
    stats.record(SchedulerStats(prefix_cache_queries=100, prefix_cache_hits=50), IterationStats())
    clock.tick()
    assert "Running: 0 reqs" in caplog.messages[-1] and not clock.due
    assert len(caplog.messages) == 3


def test_the_level_is_for_our_own_lines(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(
        "gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--log-level", "WARNING"
    )
    server.wait_for("Application startup complete")  # uvicorn's own
    server.process.terminate()
    assert server.wait() == 0
    assert server.lines and not any(
        "Serving" in line or "Stopped" in line or "Settings" in line for line in server.lines
    )


def test_a_flood_of_lines_is_cut_and_counted() -> None:
    """Of each logger, in each second; errors and other loggers' lines are not in it."""
    now, passed = 100.0, []
    limit = LogLimit(3, lambda: now)

    def record(name: str, level: int = logging.INFO) -> bool:
        return limit.filter(logging.LogRecord(name, level, "x.py", 1, "line", (), None))

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            passed.append(record.getMessage())

    logging.getLogger(LogLimit.__module__).addHandler(handler := Told())
    try:
        assert [record("access") for _ in range(5)] == [True] * 3 + [False] * 2
        assert record("other") and record("access", logging.ERROR) and not record("access", logging.WARNING)
        now += 1
        assert record("access") and passed == ["3 lines of access were left out (--max-log-lines)."]
        now += 1
        assert record("access") and len(passed) == 1
    finally:
        logging.getLogger(LogLimit.__module__).removeHandler(handler)


def test_a_flood_of_requests_is_no_flood_of_lines(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--max-log-lines", "9")
    server.wait_until_ready()
    with httpx.Client(base_url=server.url) as client:
        while not any("were left out" in line for line in server.lines):
            assert client.get("/version").status_code == 200
    server.close()
