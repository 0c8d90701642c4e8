"""`chat` and `complete` against a small server of the OpenAI API."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from patience import PATIENCE
from stub_server import StubHandler, running

from stage01_cli.main import main


class Stub(StubHandler):
    """Streams the last message in pieces, and does what special messages ask for."""

    server: StubServer

    def do_GET(self) -> None:
        self.answer(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        chat = self.path.endswith("/chat/completions")
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        if text == "refuse":
            error = {"message": "The prompt is\ntoo long.", "type": "BadRequestError", "code": 400}
            self.answer(400, {"error": error})
            return
        if text == "full":
            self.answer(400, {"error": {"message": "This model's maximum context length is 9 tokens.", "code": 400}})
            return
        if text == "missing":
            self.answer(404, {"error": {"message": "no such route", "code": 404}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        if text == "break":
            self.send_header("Content-Length", "100000")
        self.end_headers()
        for piece in ("You said: ", text, "!"):
            choice = {"index": 0, "delta": {"content": piece}} if chat else {"index": 0, "text": piece}
            self.event({"choices": [choice]})
        if text == "hang":
            while not self.server.ending.wait(0.01):  # nothing new to print, but a reader that is stopped notices it
                self.wfile.write(b": still here\n\n")
        elif text == "fail":
            self.event({"error": {"message": "The engine died.", "code": 500}})
        elif text != "break":
            self.event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}})
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: dict[str, Any]) -> None:
        super().event({"id": "x", "object": "chunk", "created": 0, "model": "m"} | value)


class StubServer(ThreadingHTTPServer):
    """Remembers the bodies of all requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stub)
        self.models, self.requests, self.ending = ["m"], list[dict[str, Any]](), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def server() -> Iterator[StubServer]:
    server = StubServer()
    with running(server):
        yield server
        server.ending.set()


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user types, and then Ctrl-D."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_a_quick_chat(server: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--url", server.url, "--system_prompt", "Be brief.", "-q", "hello"]
    assert main(words) == 0
    assert capsys.readouterr() == ("You said: hello!\n", "")
    [request] = server.requests
    assert (request["model"], request["stream"]) == ("m", True)
    assert request["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def test_a_chat_remembers_what_was_said(
    server: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "one", "", "two")
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr() == ("> You said: one!\n> > You said: two!\n> \n", "")
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["one", "You said: one!", "two"]
    assert [m["role"] for m in server.requests[-1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "bad, message",
    [("refuse", "answered 400: The prompt is too long."), ("fail", "reported an error: The engine died.")],
)
def test_a_refused_message_is_forgotten_and_the_chat_goes_on(
    bad: str, message: str, server: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, bad, "again")
    assert main(["chat", "--url", server.url]) == 0
    printed = capsys.readouterr()
    assert "You said: again!" in printed.out
    assert printed.err.count("\n") == 1 and message in printed.err
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "again"}]


def test_a_chat_that_is_too_long_says_how_to_go_on(
    server: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "full", "one", "full")
    assert main(["chat", "--url", server.url, "--max-tokens", "5"]) == 0
    first, later = capsys.readouterr().err.splitlines()
    assert "context length" in first and "/reset" not in first  # nothing was said that could be forgotten
    assert later.endswith("maximum context length is 9 tokens. /reset makes this chat forget what was said.")
    assert {request["max_tokens"] for request in server.requests} == {5}


@pytest.mark.parametrize(
    "typed, said", [("/v1", ""), ("/v2", "--url http://127.0.0.1:{}/v2/v1"), ("", "--url http://127.0.0.1:{}/v1")]
)
def test_a_url_that_is_not_of_the_api(
    typed: str, said: str, server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    address = server.url.removesuffix("/v1")
    assert main(["chat", "--url", address + typed, "--model-name", "m", "-q", "missing"]) == 2
    error = capsys.readouterr().err
    assert "answered 404: no such route" in error and ("want" in error) == bool(said)
    assert said.format(server.server_port) in error
    assert main(["chat", "--url", address.removeprefix("http://") + "/v1", "-q", "x"]) == 2
    assert "must begin with http:// or https://" in capsys.readouterr().err


def test_reset_forgets_all_but_the_system_prompt(
    server: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "one", "/reset", "two")
    assert main(["chat", "--url", server.url, "--system-prompt", "Be brief."]) == 0
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["Be brief.", "two"]
    assert len(server.requests) == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_stats_tell_tokens_and_times(command: str, server: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--url", server.url, "--stats", "-q", "hello"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "You said: hello!\n" and server.requests[-1]["stream_options"] == {"include_usage": True}
    assert re.fullmatch(
        r"1 prompt tokens, 3 output tokens, first after \d+\.\d\d s, \d+\.\d\d s in all, \d+\.\d tokens/s\n",
        printed.err,
    )


def test_ctrl_c_ends_a_long_answer_and_the_chat_goes_on(server: StubServer) -> None:
    command = [sys.executable, "-u", "-m", "stage01_cli", "chat", "--url", server.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            process.stdin.write("hang\n")
            process.stdin.flush()
            assert process.stdout.read(len("> You said: hang!")) == "> You said: hang!"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read(len("\n> ")) == "\n> "
            output, error = process.communicate("again\n", timeout=PATIENCE)
        finally:
            process.kill()
    assert (process.returncode, output, error) == (0, "You said: again!\n> \n", "")
    contents = [m["content"] for m in server.requests[-1]["messages"]]
    assert contents == ["hang", "You said: hang!", "again"]  # what had come of the answer stays in the chat


def test_complete_sends_only_what_was_given(
    server: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["complete", "--url", server.url, "--model-name", "other", "--max-tokens", "1k", "-q", "To be"]) == 0
    type_lines(monkeypatch, "or not", "refuse")
    assert main(["complete", "--url", server.url]) == 0
    printed = capsys.readouterr()
    assert printed.out == "You said: To be!\n> You said: or not!\n> > \n"
    assert printed.err == f"stages: error: the server at {server.url} answered 400: The prompt is too long.\n"
    first, second, _ = server.requests
    assert (first["model"], first["max_tokens"], first["prompt"]) == ("other", 1000, "To be")
    assert second["model"] == "m" and "max_tokens" not in {k for k, v in second.items() if v is not None}


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize(
    "text, message",
    [
        ("refuse", "answered 400: The prompt is too long."),
        ("fail", "reported an error: The engine died."),
        ("break", ""),
    ],
)
def test_a_quick_question_that_fails_is_one_line(
    command: str, text: str, message: str, server: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--url", server.url, "-q", text]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stages: error: ") and server.url in error and message in error and error.count("\n") == 1


def test_a_server_without_models(server: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = []
    assert main(["chat", "--url", server.url, "-q", "x"]) == 2
    assert capsys.readouterr().err == f"stages: error: the server at {server.url} serves no model\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "nonsense", "http://127.0.0.1:99999/v1", "http://[::1"])
@pytest.mark.parametrize("name", [[], ["--model-name=m"]])
def test_no_server_is_one_line(url: str, name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--url", url, *name, "-q", "x"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("stages: error: ") and url in printed.err


class InterruptedInput(io.StringIO):
    """The user presses Ctrl-C at the prompt."""

    def readline(self, *_: Any) -> str:
        raise KeyboardInterrupt


def test_ctrl_c_at_the_prompt_ends_quietly(
    server: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", InterruptedInput())
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr() == ("> \n", "")


def test_ctrl_c_in_a_long_answer_ends_quietly(server: StubServer) -> None:
    command = [sys.executable, "-u", "-m", "stage01_cli", "complete", "--url", server.url, "-q", "hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(len("You said: hang!")) == "You said: hang!"
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert (process.returncode, error) == (130, "")
