"""From an uploaded file to pieces of sound that Whisper can take (vllm/entrypoints/openai/speech_to_text.py).

libsndfile decodes (WAV, FLAC, OGG, MP3, ...); the rest is numpy. Imported only by a server whose model transcribes.
"""

from __future__ import annotations

import io

import numpy as np
import soundfile

from stage03_engine.errors import InvalidRequestError

SAMPLE_RATE = 16_000  # of Whisper
PIECE_SECONDS = 30  # what its encoder takes at once
SEARCH_SECONDS = 1  # a piece ends at the quietest moment of its last second, so that few words are cut in two
WINDOW = SAMPLE_RATE // 10
MAX_SAMPLES = 100_000_000  # of all channels: small files can decode to very long ones
MAX_SECONDS = 3 * 3600  # a file may say that its rate is 1 Hz: at Whisper's rate it is 16,000 times as long


def decode_audio(data: bytes) -> np.ndarray:
    """A sound file as float32 [num_samples], mono, 16,000 samples per second. Raises InvalidRequestError."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            limit = min(MAX_SAMPLES // file.channels, MAX_SECONDS * file.samplerate)
            samples, rate = file.read(limit + 1, dtype="float32", always_2d=True), file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError):
        raise InvalidRequestError("file is no audio that can be decoded (WAV, FLAC, OGG, MP3, ...).", "file") from None
    if len(samples) > limit:
        raise InvalidRequestError(
            f"file holds more than {limit / rate:.0f} seconds of audio; send it in parts.", "file"
        )
    mono = np.nan_to_num(samples.mean(axis=1), nan=0.0, posinf=1.0, neginf=-1.0)
    if not len(mono):
        raise InvalidRequestError("file holds no sound: its length is 0.", "file")
    return resample(mono, rate)


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """The same sound at 16,000 samples per second: what lies above the new half rate is cut off in the spectrum."""
    if rate == SAMPLE_RATE:
        return samples.astype(np.float32)
    length = max(1, round(len(samples) * SAMPLE_RATE / rate))
    spectrum = np.fft.rfft(samples)
    # irfft pads with zeros, or drops the end, to the given length.
    return (np.fft.irfft(spectrum, n=length) * (length / len(samples))).astype(np.float32)


def split_audio(samples: np.ndarray) -> list[np.ndarray]:
    """Pieces of at most 30 seconds, that together are the whole."""
    pieces, longest, search = [], PIECE_SECONDS * SAMPLE_RATE, SEARCH_SECONDS * SAMPLE_RATE
    while len(samples) > longest:
        windows = samples[longest - search : longest].reshape(-1, WINDOW)
        quietest = int((windows**2).sum(axis=1).argmin())
        end = longest - search + quietest * WINDOW + WINDOW // 2
        pieces.append(samples[:end])
        samples = samples[end:]
    return [*pieces, samples]
