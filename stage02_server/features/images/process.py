"""The process that decodes pictures: `python -m stage02_server.features.images.process`.

A picture is a stranger's, and its decoders are C: here one that loops, needs gigabytes or breaks harms nobody else. The operating
system ends this process when a picture takes too long, refuses it memory, and lets it run only when others leave it time.
(vLLM decodes in the API process.)

Messages both ways: length, msgpack (chat_template/framing.py). First the limits and settings. Then a file for each picture, as bytes or as
base64, answered by [error or "", the picture].
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import msgspec

from stage02_server.features.chat_template.framing import read_message, write_message
from stage02_server.features.images.decode import prepared
from stage03_engine.args.processes import wake_as_orphan
from stage03_engine.errors import InvalidRequestError
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY, ProcessingInfo
from stage03_engine.params.multimodal import Picture

NICENESS = 10
OTHER_BYTES, BYTES_PER_PIXEL = 256 << 20, 24  # beyond what the process has when it starts


class Settings(msgspec.Struct, array_like=True):
    """The first message."""

    max_bytes: int
    max_pixels: int
    max_tokens: int  # places in a prompt
    cpu_seconds: float  # for one picture
    shape: ModelShape  # of the model that will see them


def _limit_process(max_pixels: int) -> None:
    """Only Linux enforces a limit of memory."""
    os.nice(NICENESS)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + OTHER_BYTES + BYTES_PER_PIXEL * max_pixels
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_seconds(seconds: float) -> None:
    """Limit the CPU time of this process from now on; 0 lifts the limit. The signal's default action ends the process
    wherever it is, also inside a decoder."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(data: bytes | str, settings: Settings, info: ProcessingInfo) -> tuple[str, Picture | None]:
    try:
        return "", prepared(data, settings.max_bytes, settings.max_pixels, settings.max_tokens, info)
    except InvalidRequestError as error:
        return str(error), None
    except MemoryError:
        return "image_url: the image needs too much memory to be decoded.", None
    except Exception:  # decoders may do anything
        return "image_url: the image cannot be decoded.", None


def main() -> int:
    """Decode until the server closes the pipe."""
    wake_as_orphan()
    files, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        settings = msgspec.convert(read_message(files), Settings)
        info = MULTIMODAL_REGISTRY.info(settings.shape)
        _limit_process(settings.max_pixels)
        while True:
            data = read_message(files)
            _limit_seconds(settings.cpu_seconds)
            answer = _answer(data, settings, info)
            _limit_seconds(0)
            write_message(answers, answer)
    except EOFError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
