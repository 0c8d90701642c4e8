"""The server's end of the process that renders chat templates (process.py has the other end)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from stage02_server.features.chat_template.framing import read_message, write_message
from stage02_server.features.child_process.child import ChildProcess
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.plugins import find
from stagetrace import trace

SILENT_SECONDS = 20.0  # after which a process that may compute for one has been stopped, or gets no turn
TRIES = 2  # of one prompt, if its process is killed from outside


class _EndedError(Exception):
    """The process was killed from outside: nothing is known about the template."""


class TemplateRenderer:
    """Renders in a process of its own, one prompt at a time; with several API keys these take turns. The process starts with `start` or with
    the first prompt; one that ended, because a template took too long, is replaced for the next prompt. The last one ends with
    this object, or with the server."""

    def __init__(self, source: str | None, silent_seconds: float = SILENT_SECONDS) -> None:
        """`source` is the template of prompts that bring none."""
        self._source, self._child = source, ChildProcess("stage02_server.features.chat_template.process")
        pool = find("server", "turns") or ThreadPoolExecutor  # without turns by key: first come, first served
        self._thread = pool(1, "template")
        self._silent_seconds = silent_seconds
        self.content_format = "string"

    def start(self) -> None:
        """Start the process. Raises ConfigError when the template is not valid."""
        try:
            self._start()
        except (InvalidRequestError, _EndedError) as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}; see --chat-template") from None

    async def render(self, source: str | None, variables: str) -> str:
        """The prompt of the template `source`, or of the server's own, with variables given as JSON. A prompt that nobody waits
        for any longer is not begun. Raises InvalidRequestError whatever the template does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, source, variables)

    def _render(self, source: str | None, variables: str) -> str:
        for _ in range(TRIES):
            with suppress(_EndedError):
                if not self._child.runs:
                    self._start()
                return self._ask([source, variables])
        raise InvalidRequestError("its process was ended; send the request again", "messages")

    def _start(self) -> None:
        self._child.start()
        if trace.on and self._child.process is not None:
            trace.emit("template.spawned", pid=self._child.process.pid)
        if self._source is not None:
            self.content_format = self._ask([self._source])

    def _ask(self, message: list[Any]) -> str:
        try:
            with self._child.pipes(self._silent_seconds) as (requests, prompts):
                write_message(requests, message)
                problem, text = read_message(prompts)
        except (EOFError, OSError):  # of a pipe whose other end is gone
            if not self._child.end():
                raise _EndedError("its process was ended") from None
            problem, text = "it takes too long", ""
        if problem:
            raise InvalidRequestError(problem, "messages")
        return text
