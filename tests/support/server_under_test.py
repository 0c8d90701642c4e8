"""Servers for the tests: the application in this process with the echo engine, and `serve` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import httpx
from patience import PATIENCE
from prometheus_client import CollectorRegistry

from stage02_server.api_server import build_app, init_app_state
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
from stage02_server.middleware import PREFIX
from stage03_engine.config import ModelConfig, VllmConfig
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.prometheus.prometheus import PrometheusStatLogger
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import features

MAX_MODEL_LEN = 64
MOST_CPU_SECONDS = (
    0.5  # that a server's event loop may compute without a pause: twice what it warns of, as machines differ
)
EOS = 256  # the stand-in tokenizer has one token per byte, then <|endoftext|>


def byte_config(max_model_len: int = MAX_MODEL_LEN) -> VllmConfig:
    shape = ModelShape(
        architecture="GPT2LMHeadModel", vocab_size=257, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        hidden_size=8, intermediate_size=32, max_position_embeddings=max_model_len, eos_token_id=EOS,
    )  # fmt: skip
    return VllmConfig(model_config=ModelConfig(model="byte-model", max_model_len=max_model_len, shape=shape))


def all_prefixes() -> dict[str, str]:
    """Path -> how its ids begin, of every route that gives some model work, served or not."""
    paths = [part.paths for each in features() for part in each.parts if part.seam == "routes"]
    return PREFIX | {path: prefix for each in paths for path, prefix in each.items() if prefix}


class RecordingEcho(EchoCoreClient):
    """The echo engine, without waiting, and with a memory of what it was asked."""

    def __init__(self, tick_seconds: float = 0.0, config: VllmConfig | None = None) -> None:
        super().__init__(config or byte_config(), tick_seconds)
        self.added: list[str] = []
        self.seeds: list[int | None] = []
        self.aborted: list[str] = []

    async def add_request_async(self, request: Any) -> None:
        self.added.append(request.request_id)
        self.seeds.append(request.sampling_params.seed)
        await super().add_request_async(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted.extend(request_ids)
        await super().abort_requests_async(request_ids)


class InProcessServer:
    """The application on an event loop of its own; requests go in without a socket."""

    def __init__(self, client: EchoCoreClient | None = None, config: VllmConfig | None = None, **args: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.config = config or byte_config()
        self.client = client or RecordingEcho(config=self.config)
        self.args = FrontendArgs(**args)
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        registry = CollectorRegistry()
        stat_loggers = [PrometheusStatLogger(self.config, registry, "byte-model")]
        self.engine = AsyncLLM.from_vllm_config(self.config, client=self.client, stat_loggers=stat_loggers)
        self.app = build_app(self.args)
        init_app_state(self.engine, self.app, self.args, registry)
        await self.engine.start()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    async def send(self, method: str, path: str, **how: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **how)

    def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        return self.run(self.send(method, path, **how))

    def post(self, path: str, body: Any, **how: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **how)

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.run_until_complete(self._cancel_what_is_left())
        self.loop.close()

    async def _cancel_what_is_left(self) -> None:
        """As asyncio.run does: a task destroyed while it waits is reported later, in the middle of another test."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def events(text: str) -> list[Any]:
    """The data of each server-sent event; the last one must be [DONE]."""
    *blocks, rest = text.split("\n\n")
    assert rest == "" and all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


_SERVE = """
import sys
{patch}
from {command} import main
code = main(["{subcommand}", *sys.argv[1:]])
print(" ".join(sorted({{name.partition(".")[0] for name in sys.modules}})))
sys.exit(code)
"""

SLOW_LOADING = """
import asyncio, os, stage02_server.features.echo_engine.echo_engine as e
load = e.EchoCoreClient.start
async def start(self):
    while not os.path.exists({flag!r}):
        await asyncio.sleep(0.01)
    return await load(self)
e.EchoCoreClient.start = start
"""
"""Run before a server with the echo engine: it loads until the file {flag!r} is there."""

DYING_ENGINE = """
from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
from stage03_engine.errors import EngineDeadError
async def die(self):
    await self._work.wait()
    raise EngineDeadError("The engine process ended.")
EchoCoreClient.get_output_async = die
"""
"""A patch for `ServerProcess`: the echo engine dies of its first request."""


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            answer += piece
    return answer


class ServerProcess:
    """`serve ...` of a stage, or another subcommand, in a process; `patch` runs before it. Prints its top-level modules at the end. `before` is a command
    that executes another."""

    def __init__(
        self, *args: str, patch: str = "", command: str = "stage02_server.__main__", own_group: bool = False,
        before: Sequence[str] = (), subcommand: str = "serve",
    ) -> None:  # fmt: skip
        words = _SERVE.format(patch=patch, command=command, subcommand=subcommand)
        code = [*before, sys.executable, "-c", words, *args]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(code, stdout=pipe, stderr=pipe, text=True, start_new_session=own_group)
        self.lines: list[str] = []
        # True in a test that holds the event loop on purpose; this form imports torch there, for debuggers
        self.held_by_design = "--in-process" in args
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line of the log, from here on, that matches."""
        while (line := self._queue.get(timeout=PATIENCE)) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended without a line like {pattern!r}: {self.lines}")

    def wait_until_ready(self) -> str:
        self.url = self.wait_for(r"Serving \S+ on (http://\S+)$")[1].replace("0.0.0.0", "127.0.0.1")
        return self.url

    def wait_until_routing(self) -> str:
        """The same for a router."""
        self.url = self.wait_for(r"Routing on (http://\S+): ")[1].replace("0.0.0.0", "127.0.0.1")
        return self.url

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(timeout=PATIENCE)
        self._reader.join(timeout=PATIENCE)
        return code

    def close(self) -> None:
        """End it, however it is. Whatever a test asks of a server, it must not keep everybody else waiting."""
        self.process.kill()
        self.process.communicate()
        self._reader.join(timeout=PATIENCE)
        if not self.held_by_design:
            assert not (held := holds(self.lines)), held


def holds(lines: list[str]) -> list[str]:
    """The lines of a log in which something kept the event loop and computed for longer than MOST_CPU_SECONDS. Waiting does not count:
    the machine may be busy."""
    found = ((re.search(r"event loop was held for .* \((.*) s of CPU time\)", line), line) for line in lines)
    return [line for match, line in found if match and float(match[1]) > MOST_CPU_SECONDS]
