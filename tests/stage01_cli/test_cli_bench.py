"""`stages bench serve` against a server that streams what it is told to, and against a real one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_under_test import ServerProcess
from stub_server import StubHandler, running

from stage01_cli.main import main


class Stub(StubHandler):
    """Streams three pieces; the server's `faults` say what goes wrong, request by request."""

    server: StubServer

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "served-name", "root": "gpt2-tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "refuse":
            return self.answer(400, {"error": {"message": "No."}})
        if fault == "long":
            return self.answer(400, {"error": {"message": "The maximum context length is 9."}})
        if fault == "html":
            return self.answer(502, "<html>")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chat = "messages" in body
        if chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for text in ("To", " be", ", or"):
            self.event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        if fault == "error":
            self.event({"error": {"message": "The engine died."}})
        if fault in ("error", "torn"):
            return None
        if self.server.tells_usage:
            self.event({"choices": [], "usage": {"completion_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None


class StubServer(ThreadingHTTPServer):
    request_queue_size = 100

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stub)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.faults: list[str] = []
        self.tells_usage = True


@pytest.fixture
def server() -> Iterator[StubServer]:
    server = StubServer()
    with running(server):
        yield server


def bench(server: StubServer, path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """(exit code, result)."""
    usual = ["--port", str(server.server_port), "--input-len", "8", "--output-len", "7", "--num-prompts", "4"]
    saved = ["--save-result", "--save-detailed", "--result-dir", str(path), "--result-filename", "r.json"]
    code = main(["bench", "serve", *usual, *saved, *words])
    return code, json.loads((path / "r.json").read_text())


def test_requests_and_result(server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["OPENAI_API_KEY"] = "secret"
    words = ["--temperature=0.5", "--goodput", "e2el:60000", "--metadata", "gpu=none", "--header", "X-A=b=c"]
    words += [
        "--percentile-metrics=e2el",
        "--metric-percentiles=50,99.9",
        "--num-warmups=2",
        "--max-concurrency=2",
        "--request-id-prefix=a-",
    ]
    code, result = bench(server, tmp_path, *words)
    assert code == 0
    assert len(server.requests) == 1 + 2 + 4  # the first one asks whether the server answers, two warm up
    path, headers, body = server.requests[-1]
    ids = [headers["X-Request-Id"] for _, headers, _ in server.requests]
    assert sorted(ids) == sorted(["a-ready", "a-warmup-0", "a-warmup-1", *(f"a-{number}" for number in range(4))])
    assert path == "/v1/completions" and headers["Authorization"] == "Bearer secret" and headers["X-A"] == "b=c"
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("served-name", 7, 0.5, True)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 28)
    assert result["model_id"] == "served-name" and result["tokenizer_id"] == "gpt2-tiny" and result["gpu"] == "none"
    assert result["request_rate"] == "inf" and result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert {key for key in result if key.endswith("_ms")} == {
        f"{kind}_e2el_ms" for kind in ("mean", "median", "std", "p50", "p99.9")
    }
    assert result["generated_texts"] == ["To be, or"] * 4 and [len(itl) for itl in result["itls"]] == [2] * 4
    assert result["output_lens"] == [7] * 4 and result["errors"] == [""] * 4
    assert "requests completed" in capsys.readouterr().out


def test_chats_and_a_server_that_tells_no_usage(server: StubServer, tmp_path: Path) -> None:
    server.tells_usage = False
    code, result = bench(server, tmp_path, "--backend", "openai-chat", "--append-result")
    assert code == 0
    path, _, body = server.requests[-1]
    assert path == "/v1/chat/completions" and body["max_completion_tokens"] == 7
    assert body["messages"][0]["role"] == "user" and len(body["messages"]) == 1
    assert [len(itl) for itl in result["itls"]] == [2] * 4  # the role's chunk says nothing yet
    assert result["output_lens"][0] >= 3  # counted with the tokenizer


def test_failures_are_counted_and_told(server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.faults = ["", "refuse", "error", "torn", ""]
    code, result = bench(server, tmp_path, "--max-concurrency", "1")
    assert (code, result["completed"], result["failed"]) == (0, 1, 3)
    assert result["errors"][0] == "400: No." and "The engine died." in result["errors"][1]
    assert "ended before" in result["errors"][2] and result["total_output_tokens"] == 7
    assert "3 of 4 requests failed; the first one: 400: No." in capsys.readouterr().out
    server.faults = ["", *["html"] * 4]
    assert bench(server, tmp_path)[0] == 1  # nothing was measured


def test_a_server_that_refuses_the_first_request_is_not_measured(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = ["refuse"]
    assert main(["bench", "serve", "--port", str(server.server_port), "--num-prompts", "9", "--input-len", "5"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "/v1/completions failed: 400: No." in error and len(server.requests) == 1
    assert "--input-len" not in error
    server.faults = ["long"]
    assert main(["bench", "serve", "--port", str(server.server_port), "--input-len", "5"]) == 2
    assert capsys.readouterr().err.endswith("length is 9. See --input-len and --output-len.\n")
    server.faults = ["refuse", "refuse"]
    assert bench(server, tmp_path, "--ready-check-timeout-sec", "300")[0] == 0  # and this one waits


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[::1"])
def test_no_server_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", url]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("stages: error: ") and printed.err.count("\n") == 1


def test_a_result_that_cannot_be_written_is_known_before(
    server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.server_port)
    assert main(["bench", "serve", "--port", port, "--save-result", "--result-dir", "/no/such/folder"]) == 2
    assert main(["bench", "serve", "--port", port, "--save-detailed"]) == 2
    assert server.requests == [] and capsys.readouterr().err.count("\n") == 2


def test_a_real_server(tmp_path: Path) -> None:
    server = ServerProcess("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
    try:
        words = [
            "--base-url",
            server.wait_until_ready(),
            "--num-prompts",
            "6",
            "--input-len",
            "20",
            "--output-len",
            "9",
        ]
        words += ["--request-rate", "50", "--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r")]
        for backend in ("openai", "openai-chat"):
            assert main(["bench", "serve", *words, "--backend", backend]) == 0
            result = json.loads((tmp_path / "r").read_text())
            assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 54)
            assert all(ttft > 0 for ttft in result["ttfts"]) and result["mean_tpot_ms"] > 0
    finally:
        server.close()
