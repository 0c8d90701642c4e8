"""Pieces of sound that Whisper can take at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SAMPLE_RATE = 16_000  # of Whisper
PIECE_SECONDS = 30  # what its encoder takes at once
SEARCH_SECONDS = 1  # a piece ends at the quietest moment of its last second, so that few words are cut in two
WINDOW = SAMPLE_RATE // 10


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
