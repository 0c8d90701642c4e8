"""From a sound file to pieces of sound."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("soundfile")

import numpy as np
import soundfile
from hypothesis import given, strategies as st
from small_whisper import decode_audio, sound

from stage02_server.features.audio import decode as audio_input
from stage02_server.features.audio.decode import resample
from stage02_server.features.audio.pieces import SAMPLE_RATE, split_audio
from stage03_engine.errors import InvalidRequestError


@given(st.floats(0, 100), st.integers(0, 5))
def test_pieces_are_short_and_together_the_whole(seconds: float, seed: int) -> None:
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * SAMPLE_RATE)).astype(np.float32)
    pieces = split_audio(samples)
    assert np.array_equal(np.concatenate(pieces), samples)
    assert all(len(piece) <= 30 * SAMPLE_RATE for piece in pieces)
    assert all(len(piece) >= 29 * SAMPLE_RATE for piece in pieces[:-1])


def test_a_piece_ends_in_silence() -> None:
    samples = np.ones(40 * SAMPLE_RATE, dtype=np.float32)
    quiet = int(29.4 * SAMPLE_RATE)
    samples[quiet : quiet + SAMPLE_RATE // 5] = 0
    assert quiet < len(split_audio(samples)[0]) < quiet + SAMPLE_RATE // 5


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_000])
def test_a_tone_stays_the_same_tone(rate: int) -> None:
    """Three seconds of 440 Hz, faded in and out, are the same function of time at every rate."""

    def tone(rate: int) -> np.ndarray:
        time = np.arange(3 * rate) / rate
        return np.sin(2 * np.pi * 440 * time) * np.sin(np.pi * time / 3) ** 2

    assert np.abs(resample(tone(rate), rate) - tone(SAMPLE_RATE)).max() < 1e-3


@pytest.mark.parametrize(("form", "channels"), [("WAV", 1), ("WAV", 2), ("FLAC", 1), ("OGG", 2), ("MP3", 1)])
def test_formats(form: str, channels: int) -> None:
    samples = decode_audio(sound(1.0, rate=44_100, channels=channels, form=form))
    assert samples.dtype == np.float32 and abs(len(samples) - SAMPLE_RATE) < SAMPLE_RATE * 0.1
    assert 0.2 < np.abs(samples).max() < 0.8


def test_a_small_file_that_decodes_to_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_input, "MAX_SAMPLES", 100_000)
    for channels in (1, 2):
        file = io.BytesIO()
        soundfile.write(file, np.zeros((100_000 // channels, channels)), 8000, format="FLAC")
        assert len(file.getvalue()) < 5000
        assert len(decode_audio(file.getvalue())) == 200_000 // channels
        soundfile.write(file := io.BytesIO(), np.zeros((100_000 // channels + 1, channels)), 8000, format="FLAC")
        with pytest.raises(InvalidRequestError, match="send it in parts"):
            decode_audio(file.getvalue())


@pytest.mark.parametrize("rate", [8_000, 44_100, 44_101, 1_000])
@pytest.mark.parametrize("seconds", [9.99, 10, 11, 21])
def test_blocks_are_the_whole(rate: int, seconds: float) -> None:
    """Block by block, the sound is as when it is resampled at once; but for the ends, where the latter hears the other end."""
    data = sound(seconds, rate=rate)
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    at_once, in_blocks = resample(samples, rate), decode_audio(data)
    assert len(in_blocks) == len(at_once) and np.abs(in_blocks - at_once)[1600:-1600].max() < 5e-3
