"""The server's end of the process that simulates (worker.py has the other end)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

LIMIT_SECONDS = 5.0  # of CPU time
PATIENCE_SECONDS = 60.0  # for the answer, on a busy machine: the process ends by itself before that
MAX_ANSWER_BYTES = 64 << 20
ENDED = "The simulation's process was ended: it took more than {:g} seconds of CPU time, waited for something, or ended itself."


class Simulator:
    """Simulates one scenario at a time, first come, first served. The process starts with the first; one that ended is replaced."""

    def __init__(self, scheduler_cls: str | None, limit_seconds: float = LIMIT_SECONDS, shut_in: bool = False) -> None:
        """`scheduler_cls`: the learner's own, as `FILE.py:Class` or `module:Class`. `shut_in`: the process writes no file, starts none and asks nobody."""
        self._own = [] if scheduler_cls is None else [scheduler_cls]
        self._shut_in = ["--shut-in"] if shut_in else []
        self._limit = limit_seconds
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: bytes) -> bytes:
        """The answer of `simulate`, as JSON. `question` is JSON without a line break: {"scenario": ..., "own": bool, "code": the text of a class, or None}."""
        async with self._turn:
            try:
                return await asyncio.wait_for(self._ask(question), PATIENCE_SECONDS)
            except (TimeoutError, EOFError, OSError, ValueError, asyncio.LimitOverrunError):
                await self.close()
                return json.dumps({"problem": ENDED.format(self._limit)}).encode()
            except asyncio.CancelledError:
                await self.close()  # or the next one would read this answer
                raise

    async def _ask(self, question: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            await self.close()  # with what an ended one left
            await self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(question + b"\n")
        await process.stdin.drain()
        return await process.stdout.readuntil(b"\n")

    async def _start(self) -> None:
        words = ["-m", "stage01_cli.tools.lab.worker", str(self._limit), *self._shut_in, *self._own]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_ANSWER_BYTES,
            start_new_session=True,  # what a class starts ends with it, and Ctrl-C reaches the server alone
        )  # fmt: skip

    async def close(self) -> None:
        """End the process, whatever it is doing. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
