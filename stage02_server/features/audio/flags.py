"""The flag that bounds sound."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class AudioFlags:
    """How much sound a request may bring."""

    max_audio_seconds: int = option(
        10800,
        "most seconds of one sound file (400 beyond); the files of all requests together may have twice as many (429 beyond)",
        at_least=1,
    )
