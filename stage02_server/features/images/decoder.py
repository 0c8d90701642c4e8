"""The server's end of the process that decodes pictures (process.py has the other end)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from stage02_server.features.chat_template.framing import read_message, write_message
from stage02_server.features.images.process import Settings
from stage03_engine.args.command import signals_are_ours
from stage03_engine.args.processes import killed_after
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.multimodal import Picture
from stage03_engine.plugins import find

CPU_SECONDS = 5.0  # for one picture: the largest that the limits allow takes about one
SILENT_SECONDS = 4 * CPU_SECONDS  # after which the process has been stopped, or gets no turn


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


class ImageDecoder:
    """One picture at a time; with several API keys these take turns. The process starts with the first picture, and is replaced when it has
    ended. The last one ends with this object, or with the server."""

    def __init__(self, settings: Settings, silent_seconds: float = SILENT_SECONDS) -> None:
        self._settings, self._silent_seconds = settings, silent_seconds
        pool = find("server", "turns") or ThreadPoolExecutor  # without turns by key: first come, first served
        self._thread = pool(1, "images")
        self._process: subprocess.Popen[bytes] | None = None

    _finalizer: weakref.finalize

    async def decode(self, data: bytes | str | Callable[[], bytes]) -> Picture:
        """A file, its base64, or what reads it, in the thread. Raises InvalidRequestError whatever the file does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, data)

    def _decode(self, data: bytes | str | Callable[[], bytes]) -> Picture:
        if callable(data):
            data = data()
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            with killed_after(process, self._silent_seconds):
                write_message(process.stdin, data)
                problem, picture = read_message(process.stdout)
        except (EOFError, OSError):  # of a pipe whose other end is gone
            self._process = None
            self._finalizer()
            slow = process.returncode == -signal.SIGPROF
            why = "takes too long to be decoded" if slow else "cannot be decoded"
            raise InvalidRequestError(f"image_url: the image {why}.", "messages") from None
        if problem:
            raise InvalidRequestError(problem, "messages")
        return msgspec.convert(picture, Picture)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:  # killed since then
            self._finalizer()
            self._process = None
        if self._process is None:
            command, pipe = [sys.executable, "-m", "stage02_server.features.images.process"], subprocess.PIPE
            with signals_are_ours():
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._finalizer = weakref.finalize(self, _end, self._process)
            assert self._process.stdin is not None
            write_message(self._process.stdin, self._settings)
        return self._process
