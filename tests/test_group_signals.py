"""A signal that reaches all processes of a server at once: Ctrl-C in a terminal, systemd at the end of a service."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

FLAGS = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "50000000")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
COMMAND = "stage01_cli.main"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(*FLAGS, "--chat-template", TEMPLATE, command=COMMAND, own_group=True)
    yield server
    server.close()


@pytest.mark.slow
def test_running_requests_finish_all_the_same(server: ServerProcess) -> None:
    """With everything that they need: the engine, and the process that checks grammars."""
    url = server.wait_until_ready()
    body = {
        "messages": [{"role": "user", "content": "ROMEO:"}], "max_tokens": 450, "ignore_eos": True, "stream": True,
        "structured_outputs": {"regex": "[a-z ]{2000}"},
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 3  # engine, templates, and the process that checked our grammar
        os.killpg(server.process.pid, signal.SIGTERM)
        server.wait_for("SIGTERM: finishing 1 requests")
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def test_ctrl_c_while_the_engine_starts(server: ServerProcess) -> None:
    server.wait_for("HTTP is up")
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait() == 0
    assert not any("Traceback" in line or "error" in line for line in server.lines), server.lines
