"""Small files that become large images, and what else a stranger's file can do to its decoder."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import psutil
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from small_llava import PATCH, SIDE, encoded, picture

from stage02_server.features.images.decode import FORMATS, prepared
from stage02_server.features.images.decoder import ImageDecoder
from stage02_server.features.images.process import NICENESS, Settings
from stage03_engine.errors import InvalidRequestError
from stage03_engine.model_shape import ModelShape
from stage03_engine.multimodal.llava import LlavaProcessingInfo
from stage03_engine.multimodal.shape_fields import ImageProcessorConfig, PixelValues, VisionShape
from stage03_engine.params.multimodal import Picture

SQUARE = ImageProcessorConfig(SIDE, 3, (SIDE, SIDE), PixelValues(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
TOWER = VisionShape(24, 40, 3, 2, SIDE, PATCH, 1e-5, "gelu", 2, False, "gelu", True, SQUARE)
SHAPE = ModelShape("LlavaForConditionalGeneration", 300, 2, 4, 2, 8, 32, 48, 512, vision=TOWER, image_token=5)  # type: ignore[call-arg]
MAX_BYTES, MAX_PIXELS, MAX_TOKENS = 8 << 20, 4 << 20, 1 << 20


def settings_of(cpu_seconds: float = 5.0, max_pixels: int = MAX_PIXELS) -> Settings:
    return Settings(MAX_BYTES, max_pixels, MAX_TOKENS, cpu_seconds, SHAPE)


def decoded(decoder: ImageDecoder, data: bytes | str) -> Picture:
    return asyncio.run(decoder.decode(data))


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder(settings_of())
    yield made
    end(made)


def end(decoder: ImageDecoder) -> None:
    decoder._child.end()
    decoder._thread.shutdown()


def refusal(decoder: ImageDecoder, data: bytes | str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decoded(decoder, data)
    assert "\n" not in str(caught.value) and caught.value.param == "messages"
    return str(caught.value)


def png(width: int, height: int, data: bytes, more: bytes = b"") -> bytes:
    """A file whose head says what it likes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@cache
def zeros(size: int) -> bytes:
    packer = zlib.compressobj(1)
    return b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(size >> 20)) + packer.flush()


def test_a_small_file_of_many_pixels_is_refused_by_its_head(decoder: ImageDecoder) -> None:
    """30,000 x 30,000 pixels would be 2.7 GB; its data, which is never looked at, would be 2.6 MB."""
    assert "has 30000 x 30000 pixels" in refusal(decoder, png(30_000, 30_000, zeros(8 << 20)))


@pytest.mark.parametrize("size", [(1, 1), pytest.param((100, 100), marks=pytest.mark.slow)], ids=str)
def test_a_head_that_lies(size: tuple[int, int], decoder: ImageDecoder) -> None:
    """It says few pixels, and has data for half a gigabyte: what is too much is not unpacked."""
    file = png(*size, zeros(1 << 29))
    with suppress(InvalidRequestError):
        decoded(decoder, file)
    assert decoder._child.process is not None
    memory = psutil.Process(decoder._child.process.pid).memory_info()
    assert memory.rss < 400 << 20
    assert len(decoded(decoder, encoded(picture(1))).data) == SIDE * SIDE * 3


def test_a_head_that_promises_more_than_comes(decoder: ImageDecoder) -> None:
    assert "is broken" in refusal(decoder, png(2000, 2000, zlib.compress(b"\0" * 1000)))


def test_a_text_within_that_grows(decoder: ImageDecoder) -> None:
    """PNG may hold packed texts; nobody asked for them."""
    body = b"Comment\0\0" + zeros(1 << 29)
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    rows = zlib.compress(b"".join(b"\0" + b"\x80" * 3 * 40 for _ in range(30)))
    with suppress(InvalidRequestError):
        decoded(decoder, png(40, 30, rows, chunk))
    assert (
        decoder._child.process is not None and psutil.Process(decoder._child.process.pid).memory_info().rss < 400 << 20
    )


def test_what_needs_too_much_memory(decoder: ImageDecoder) -> None:
    """Whoever allows more pixels than the process has memory for reads one line as well."""
    assert decoded(decoder, encoded(picture(1)))
    process = psutil.Process(decoder._child.process.pid)  # type: ignore[union-attr]
    now = process.memory_info().vms
    process.rlimit(psutil.RLIMIT_AS, (now + (8 << 20), now + (8 << 20)))
    assert refusal(decoder, encoded(picture(2, (2000, 2000)))) in (
        "image_url: the image needs too much memory to be decoded.", "image_url: the image is broken, and cannot be decoded.",
    )  # fmt: skip


def test_what_takes_too_long() -> None:
    decoder = ImageDecoder(settings_of(cpu_seconds=0.05, max_pixels=64 << 20))
    try:
        assert (
            refusal(decoder, encoded(picture(1, (3500, 3500)))) == "image_url: the image takes too long to be decoded."
        )
        assert len(decoded(decoder, encoded(picture(1))).data) == SIDE * SIDE * 3, "no new process came"
    finally:
        end(decoder)


def test_a_process_that_was_killed_is_replaced(decoder: ImageDecoder) -> None:
    decoded(decoder, encoded(picture(1)))
    process = decoder._child.process
    assert process is not None
    process.kill()
    process.wait()
    assert decoded(decoder, encoded(picture(1)))


def test_a_process_that_stands_still_is_replaced() -> None:
    decoder = ImageDecoder(settings_of(), silent_seconds=3)
    try:
        decoded(decoder, encoded(picture(1)))
        assert decoder._child.process is not None
        os.kill(decoder._child.process.pid, signal.SIGSTOP)
        assert refusal(decoder, encoded(picture(1))) == "image_url: the image cannot be decoded."
        assert decoded(decoder, encoded(picture(1)))
    finally:
        end(decoder)


def test_the_process_is_limited(decoder: ImageDecoder) -> None:
    decoded(decoder, encoded(picture(1)))
    assert decoder._child.process is not None
    process = psutil.Process(decoder._child.process.pid)
    assert process.nice() == min(19, psutil.Process().nice() + NICENESS)
    assert 0 < process.rlimit(psutil.RLIMIT_AS)[0] < 2 << 30  # -1: none


def test_the_process_ends_with_its_decoder() -> None:
    decoder = ImageDecoder(settings_of())
    decoded(decoder, encoded(picture(1)))
    process = decoder._child.process
    assert process is not None
    decoder._thread.shutdown()
    del decoder
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_the_loop_goes_on_meanwhile(decoder: ImageDecoder) -> None:
    """A large file is sent, decoded and hashed elsewhere."""

    async def longest_pause() -> float:
        working = asyncio.ensure_future(
            decoder.decode(base64.b64encode(encoded(picture(1, (1500, 1500)), "PNG")).decode())
        )
        longest, last = 0.0, time.thread_time()
        while not working.done():
            await asyncio.sleep(0)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        await working
        return longest

    assert asyncio.run(longest_pause()) < 0.1


def test_one_at_a_time(decoder: ImageDecoder) -> None:
    async def several() -> list[Picture]:
        return await asyncio.gather(*(decoder.decode(encoded(picture(number))) for number in range(5)))

    found = asyncio.run(several())
    assert len({each.identifier for each in found}) == 5
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("images")]) == 1


FILES = [encoded(picture(2, (60, 40)), form) for form in FORMATS]


@given(st.sampled_from(FILES), st.data())
def test_any_damage_is_a_picture_or_one_line(file: bytes, data: st.DataObject) -> None:
    damaged = bytearray(file)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(1, len(file))) :]
    try:
        assert (
            len(prepared(bytes(damaged), MAX_BYTES, 1 << 20, MAX_TOKENS, LlavaProcessingInfo(SHAPE)).data)
            == SIDE * SIDE * 3
        )
    except InvalidRequestError as error:
        assert "\n" not in str(error)
