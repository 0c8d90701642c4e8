"""Small sound files that become large ones, and what else a stranger's file can do to its decoder."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import threading
import time
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("soundfile")

import httpx
import numpy as np
import psutil
import soundfile
from hypothesis import given, strategies as st
from patience import PATIENCE
from server_under_test import ServerProcess
from small_whisper import decode_audio, sound, whisper_folder
from standstill import LONGEST, Standstill

from stage02_server.errors import APIError
from stage02_server.features.audio import decoder as decoder_module
from stage02_server.features.audio.decoder import MOST_UPLOADS, SoundDecoder, SoundDecoders
from stage02_server.features.audio.manifest import AudioFlags
from stage02_server.features.audio.pieces import SAMPLE_RATE
from stage03_engine.errors import InvalidRequestError


def wav(num_samples: int, rate: int) -> bytes:
    data = b"\0\1" * num_samples
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return head + b"data" + struct.pack("<I", len(data)) + data


@pytest.mark.parametrize("rate", [1, 10])
def test_a_low_rate_does_not_make_it_endless(rate: int) -> None:
    """25 MiB at 1 Hz would be 800 GB at Whisper's rate."""
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=f"{AudioFlags.max_audio_seconds} seconds"):
        decode_audio(wav(AudioFlags.max_audio_seconds * rate + 1, rate))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert len(decode_audio(wav(100 * rate, rate))) == 100 * SAMPLE_RATE


def test_a_broken_file_is_refused() -> None:
    for data in (b"", b"RIFF", wav(1000, 0), wav(0, 16_000), b"fLaC"):
        with pytest.raises(InvalidRequestError):
            decode_audio(data)


def silence(seconds: float, rate: int = SAMPLE_RATE, channels: int = 1, form: str = "FLAC") -> bytes:
    file, left = io.BytesIO(), int(seconds * rate)
    with soundfile.SoundFile(file, "w", samplerate=rate, channels=channels, format=form) as out:
        while left > 0:
            out.write(np.zeros((min(left, 1 << 20), channels), np.int16))
            left -= 1 << 20
    return file.getvalue()


@pytest.fixture(scope="module")
def decoder() -> SoundDecoder:
    return SoundDecoder(60)


def pid_of(decoder: SoundDecoder) -> int:
    assert decoder._child.process is not None
    return decoder._child.process.pid


def decoded(decoder: SoundDecoder, data: bytes) -> np.ndarray:
    samples = np.empty(decoder.begin(data), np.float32)
    decoder.finish(samples)
    return samples


@pytest.mark.parametrize("how", [{}, {"form": "OGG", "rate": 44_100}, {"form": "MP3", "rate": 8_000, "channels": 2}])
def test_the_process_decodes_as_the_function_does(decoder: SoundDecoder, how: dict[str, Any]) -> None:
    data = sound(21.5, **how)
    assert np.array_equal(decoded(decoder, data), decode_audio(data))


@pytest.mark.parametrize("how", [{}, {"channels": 8}, {"rate": 655_350}, {"form": "OGG"}], ids=str)
def test_what_unpacks_is_refused_without_unpacking_it(decoder: SoundDecoder, how: dict[str, Any]) -> None:
    """A minute is the limit here. The server never has more than the file, its decoder never more than a few blocks."""
    data = silence(61, **how)
    with pytest.raises(InvalidRequestError, match=r"more than \d+ seconds of audio \(--max-audio-seconds\)"):
        decoder.begin(data)
    assert psutil.Process(pid_of(decoder)).memory_info().rss < 700_000_000
    assert len(decoded(decoder, sound(0.5))) == SAMPLE_RATE // 2, "the same process goes on"


def test_memory_and_niceness_of_the_process_are_limited(decoder: SoundDecoder) -> None:
    decoded(decoder, sound(0.1))
    process = psutil.Process(pid_of(decoder))
    assert process.nice() == 10
    soft, hard = process.rlimit(psutil.RLIMIT_AS)
    assert soft == hard and 0 < soft < 8 * 1024**3


def test_a_rate_beyond_the_limit_is_refused(decoder: SoundDecoder) -> None:
    with pytest.raises(InvalidRequestError, match="2000000000 samples per second; at most 768000"):
        decoder.begin(wav(1000, 2_000_000_000))


LYING = [
    wav(1000, 16_000).replace(struct.pack("<I", 2000), struct.pack("<I", 0xFFFFFFFF)),  # the length of the sound
    wav(1000, 16_000).replace(struct.pack("<I", 2000), struct.pack("<I", 7)),
    wav(1000, 16_000).replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 65_535), 1),  # its channels
    wav(1000, 16_000).replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 1, 0), 1),
    silence(5)[:60], silence(5, form="OGG")[:4000], sound(1, form="MP3")[:700], sound(3, form="FLAC")[:-20],
]  # fmt: skip


@pytest.mark.parametrize("data", LYING, ids=range(len(LYING)))
def test_files_that_lie_or_end_too_soon_are_decoded_as_far_as_they_go_or_refused(
    decoder: SoundDecoder, data: bytes
) -> None:
    try:
        assert 0 < len(decoded(decoder, data)) <= 5 * SAMPLE_RATE
    except InvalidRequestError as error:
        assert str(error).startswith("file ")


@given(
    st.sampled_from([sound(0.2), sound(0.2, form="FLAC"), sound(0.2, form="OGG"), sound(0.2, form="MP3")]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 4000),
)
def test_broken_files_never_break_more_than_their_own_request(
    decoder: SoundDecoder, whole: bytes, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(whole[: len(whole) - end])
    for place, value in changes:
        if place < len(data):
            data[place] = value
    try:
        decoded(decoder, bytes(data))
    except InvalidRequestError as error:
        assert error.param == "file"


def test_a_process_that_is_ended_is_replaced() -> None:
    """By its limit of CPU time, which an empty file does not reach, or by somebody."""
    decoder = SoundDecoder(300, cpu_seconds=0.02)
    with pytest.raises(InvalidRequestError, match="no audio"):
        decoder.begin(b"")
    first = pid_of(decoder)
    with pytest.raises(InvalidRequestError, match="takes too long"):
        decoder.begin(silence(299, rate=44_100))
    assert not psutil.pid_exists(first)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="no audio"):
            decoder.begin(b"")
        decoder.kill()
        os.waitid(os.P_PID, pid_of(decoder), os.WEXITED | os.WNOWAIT)


def test_no_more_is_held_than_there_is_room_for() -> None:
    """Twice as much as one request may bring: 10 seconds."""

    async def check() -> None:
        decoders = SoundDecoders(5)

        async def one(seconds: float) -> np.ndarray:
            async def read() -> bytes:
                return sound(seconds)

            return await decoders.decode("a", read)

        held = [await one(4), await one(4)]
        with pytest.raises(APIError) as late:
            await one(4)
        assert late.value.status == 429 and "--max-audio-seconds" in late.value.message
        held.append(await one(2))
        del held[0]
        held.append(await one(4))
        with pytest.raises(InvalidRequestError, match="more than 5 seconds"):
            await one(5.5)

    asyncio.run(check())


def test_a_client_that_leaves_ends_its_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next turn begins when nothing is left of it."""
    began, killed = threading.Event(), threading.Event()

    class Endless:
        def __init__(self, max_seconds: int) -> None: ...

        def begin(self, data: bytes) -> int:
            began.set()
            assert killed.wait(PATIENCE)
            raise InvalidRequestError("ended", "file")

        def kill(self) -> None:
            killed.set()

    monkeypatch.setattr(decoder_module, "SoundDecoder", Endless)

    async def check() -> None:
        decoders = SoundDecoders(5)

        async def read() -> bytes:
            return b""

        first = asyncio.create_task(decoders.decode("a", read))
        await asyncio.to_thread(began.wait, PATIENCE)
        second = asyncio.create_task(decoders.decode("a", read))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert killed.is_set()
        with pytest.raises(InvalidRequestError, match="ended"):
            await second

    asyncio.run(check())


@pytest.mark.long
def test_sound_that_unpacks_brings_no_standstill(tmp_path: Path) -> None:
    """Four strangers send 300 kB each that are 100 million samples and more; meanwhile a neighbour's small sound is answered."""
    bombs = [silence(6248), silence(150, rate=655_350), silence(2083, rate=48_000), silence(2_000, channels=8)]
    server = ServerProcess(str(whisper_folder(tmp_path)), "--port", "0", "--engine", "echo")
    try:
        url = server.wait_until_ready() + "/v1/audio/transcriptions"
        process, form = psutil.Process(server.process.pid), {"language": "en", "max_completion_tokens": "1"}
        assert httpx.post(url, files={"file": sound(0.5)}, data=form, timeout=PATIENCE).status_code == 200
        before, peak, answers = process.memory_info().rss, 0, list[int]()

        def attack(bomb: bytes) -> None:
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{2 + bombs.index(bomb)}")
            with httpx.Client(transport=transport, timeout=PATIENCE) as client:
                too_many = form | {"max_completion_tokens": "99999"}  # decoded in full, then refused
                answers.append(client.post(url, files={"file": bomb}, data=too_many).status_code)

        threads = [threading.Thread(target=attack, args=(bomb,)) for bomb in bombs]
        with Standstill(url.partition("/v1")[0]) as standstill:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                peak = max(peak, process.memory_info().rss)
                start = time.monotonic()
                assert httpx.post(url, files={"file": sound(0.5)}, data=form, timeout=PATIENCE).status_code == 200
                print(f"a neighbour's sound took {time.monotonic() - start:.1f} s")
        assert answers == [400] * 4
        print(f"{standstill.seconds:.3f} s, {(peak - before) / 1e6:.0f} MB")
        assert peak - before < 2 * AudioFlags.max_audio_seconds * SAMPLE_RATE * 4 + 200e6
        assert standstill.seconds < LONGEST
        assert not [line for line in server.lines if "Traceback" in line]
    finally:
        server.close()


def test_a_client_has_so_many_files_on_the_disk_and_no_more() -> None:
    """Another client's do not count, and what has ended, in whatever way, makes room again."""
    decoders = SoundDecoders(60)
    with ExitStack() as waiting:
        for _ in range(MOST_UPLOADS):
            waiting.enter_context(decoders.upload("a"))
        with pytest.raises(APIError) as refused, decoders.upload("a"):
            pass
        assert refused.value.status == 429
        with pytest.raises(ZeroDivisionError), decoders.upload("b"):
            raise ZeroDivisionError
    with decoders.upload("a"):
        pass
    assert not decoders._uploads
