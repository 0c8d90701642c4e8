"""Small sound files that become large ones."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

pytest.importorskip("soundfile")

from stage02_server.features.audio.decode import MAX_SECONDS, SAMPLE_RATE, decode_audio
from stage03_engine.errors import InvalidRequestError


def wav(num_samples: int, rate: int) -> bytes:
    data = b"\0\1" * num_samples
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return head + b"data" + struct.pack("<I", len(data)) + data


@pytest.mark.parametrize("rate", [1, 10])
def test_a_low_rate_does_not_make_it_endless(rate: int) -> None:
    """25 MiB at 1 Hz would be 800 GB at Whisper's rate."""
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=f"{MAX_SECONDS} seconds"):
        decode_audio(wav(MAX_SECONDS * rate + 1, rate))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert len(decode_audio(wav(100 * rate, rate))) == 100 * SAMPLE_RATE


def test_a_broken_file_is_refused() -> None:
    for data in (b"", b"RIFF", wav(1000, 0), wav(0, 16_000), b"fLaC"):
        with pytest.raises(InvalidRequestError):
            decode_audio(data)
