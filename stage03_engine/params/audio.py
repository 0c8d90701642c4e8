"""What a model that turns speech into text gets and gives: an EngineCoreRequest's `task`, and its result "speech"."""

from __future__ import annotations

import msgspec


class AudioInput(msgspec.Struct, array_like=True, gc=False):
    """The sound to transcribe, and whether to say when each part was spoken."""

    samples: bytes  # float32, 16,000 numbers per second, at most 30 seconds
    timestamps_from: int | None = None  # the id of the token for 0.00 seconds; None: text without timestamps
    word_timestamps: bool = False  # only with timestamps_from: also the time of each token


class SpeechDetails(msgspec.Struct, array_like=True, gc=False):
    """What comes with the last token of a request with timestamps."""

    no_speech_prob: float  # how likely it is that nobody speaks, in [0, 1]
    token_ends: list[float] | None = None  # with word_timestamps: when each output token ends, in seconds
