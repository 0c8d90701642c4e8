"""From an uploaded file to the sound that Whisper hears (vllm/entrypoints/speech_to_text/base/utils.py).

libsndfile decodes (WAV, FLAC, OGG, MP3, ...); the rest is numpy. A small file can hold hours of sound, so both work block by block:
memory depends on the size of a block, and time on the limits. Runs in a process of its own (process.py).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import chain

import numpy as np
import soundfile

from stage02_server.features.audio.pieces import SAMPLE_RATE
from stage03_engine.errors import InvalidRequestError

MAX_SAMPLES = 100_000_000  # of all channels, in the file: decoding them takes a few seconds
MAX_RATE = 768_000  # samples per second of a file: memory grows with it
READ_SAMPLES = 1 << 20  # of all channels, decoded at once
BLOCK_SECONDS = 10  # that are brought to Whisper's rate at once
BAD_FILE = (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, AssertionError, OverflowError)


class Sound:
    """An open sound file. Its methods raise InvalidRequestError for what cannot be decoded, or is too much."""

    def __init__(self, data: bytes, max_seconds: int) -> None:
        self._data = data
        with self._opened() as file:
            self._rate = file.samplerate
            if self._rate > MAX_RATE:
                raise InvalidRequestError(f"file has {self._rate} samples per second; at most {MAX_RATE}.", "file")
            by_seconds, by_samples = max_seconds * self._rate, MAX_SAMPLES // file.channels
            self._limit = min(by_seconds, by_samples)
            self._rule = "--max-audio-seconds" if by_seconds <= by_samples else f"{MAX_SAMPLES} samples of all channels"

    def _opened(self) -> soundfile.SoundFile:
        try:
            return soundfile.SoundFile(io.BytesIO(self._data))
        except BAD_FILE:
            raise _no_audio() from None

    def length(self) -> int:
        """How many samples the sound has at Whisper's rate. What a file says about its length may be wrong: all is decoded."""
        frames = sum(len(block) for block in self._frames())
        if not frames:
            raise InvalidRequestError("file holds no sound: its length is 0.", "file")
        return frames if self._rate == SAMPLE_RATE else max(1, round(frames * SAMPLE_RATE / self._rate))

    def blocks(self) -> Iterator[np.ndarray]:
        """The sound as float32, mono, 16,000 samples per second, a block at a time."""
        return resampled(self._frames(), self._rate)

    def _frames(self) -> Iterator[np.ndarray]:
        """Mono, float32, at the rate of the file, BLOCK_SECONDS at a time; only the last block is shorter."""
        with self._opened() as file:
            taken, wanted, parts = 0, BLOCK_SECONDS * self._rate, list[np.ndarray]()
            while True:
                missing = wanted - sum(map(len, parts))
                try:
                    read = file.read(max(1, min(missing, READ_SAMPLES // file.channels)), "float32", always_2d=True)
                except BAD_FILE:
                    raise _no_audio() from None
                taken += len(read)
                if taken > self._limit:
                    seconds = f"{self._limit / self._rate:.0f} seconds of audio"
                    raise InvalidRequestError(
                        f"file holds more than {seconds} ({self._rule}); send it in parts.", "file"
                    )
                parts.append(np.nan_to_num(read.mean(axis=1), nan=0.0, posinf=1.0, neginf=-1.0))
                if len(read) == missing or not len(read):
                    block, parts = np.concatenate(parts), []
                    if len(block):
                        yield block
                    if not len(read):
                        return


def _no_audio() -> InvalidRequestError:
    return InvalidRequestError("file is no audio that can be decoded (WAV, FLAC, OGG, MP3, ...).", "file")


def resampled(blocks: Iterator[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """The same sound at 16,000 samples per second. All blocks but the last have BLOCK_SECONDS.

    Each is resampled between a second of the block before and one of the block after, which fade out, and is cut out
    again: so no block hears its own end.
    """
    before, fade = np.zeros(rate, np.float32), _fade(rate)
    block = next(blocks, None)
    if rate == SAMPLE_RATE:
        yield from (each.astype(np.float32) for each in chain([] if block is None else [block], blocks))
        return
    whole = True
    while block is not None:
        after = next(blocks, None)
        if whole and after is None:
            yield resample(block, rate)
            return
        whole = False
        length = round(len(block) * SAMPLE_RATE / rate)
        ends = _filled(after if after is not None else block[:0], rate) * fade[::-1]
        # To whole seconds, whose number of samples is exact at both rates.
        padded = _filled(block, -(-len(block) // rate) * rate)
        yield resample(np.concatenate([before * fade, padded, ends]), rate)[SAMPLE_RATE : SAMPLE_RATE + length]
        before, block = block[-rate:], after


def _fade(rate: int) -> np.ndarray:
    """Rises from 0 to 1 in half a second, and stays there for another."""
    return np.sin(np.minimum(np.arange(rate) / rate, 0.5) * np.pi).astype(np.float32) ** 2


def _filled(samples: np.ndarray, length: int) -> np.ndarray:
    """The first samples, with zeros behind them if there are too few."""
    return np.pad(samples[:length], (0, max(0, length - len(samples))))


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """The same sound at 16,000 samples per second: what lies above the new half rate is cut off in the spectrum."""
    if rate == SAMPLE_RATE:
        return samples.astype(np.float32)
    length = max(1, round(len(samples) * SAMPLE_RATE / rate))
    spectrum = np.fft.rfft(samples)
    # irfft pads with zeros, or drops the end, to the given length.
    return (np.fft.irfft(spectrum, n=length) * (length / len(samples))).astype(np.float32)
