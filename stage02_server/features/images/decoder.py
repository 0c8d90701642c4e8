"""The server's end of the process that decodes pictures (process.py has the other end)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from stage02_server.features.chat_template.framing import read_message, write_message
from stage02_server.features.child_process.child import ChildProcess
from stage02_server.features.images.process import Settings
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.multimodal import Picture
from stage03_engine.plugins import find

CPU_SECONDS = 5.0  # for one picture: the largest that the limits allow takes about one
SILENT_SECONDS = 4 * CPU_SECONDS  # a process that is silent for longer was stopped, or gets no CPU time


class ImageDecoder:
    """One picture at a time; with several API keys these take turns. The process starts with the first picture, and is replaced when it has
    ended. The last one ends with this object, or with the server."""

    def __init__(self, settings: Settings, silent_seconds: float = SILENT_SECONDS) -> None:
        self._settings, self._silent_seconds = settings, silent_seconds
        pool = find("server", "turns") or ThreadPoolExecutor  # without turns by key: first come, first served
        self._thread = pool(1, "images")
        self._child = ChildProcess("stage02_server.features.images.process")

    async def decode(self, data: bytes | str | Callable[[], bytes]) -> Picture:
        """`data`: a file, its base64, or a function that reads it, called in the thread. Raises InvalidRequestError whatever the file does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, data)

    def _decode(self, data: bytes | str | Callable[[], bytes]) -> Picture:
        if callable(data):
            data = data()
        starts = not self._child.runs
        if starts:
            self._child.start()
        try:
            with self._child.pipes(self._silent_seconds) as (files, answers):
                if starts:
                    write_message(files, self._settings)
                write_message(files, data)
                problem, picture = read_message(answers)
        except (EOFError, OSError):  # of a pipe whose other end is gone
            why = "takes too long to be decoded" if self._child.end() else "cannot be decoded"
            raise InvalidRequestError(f"image_url: the image {why}.", "messages") from None
        if problem:
            raise InvalidRequestError(problem, "messages")
        return msgspec.convert(picture, Picture)
