"""The flag that bounds sound."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class AudioFlags:
    """How much sound a request may bring."""

    max_audio_seconds: int = option(
        10800,
        "most seconds of one sound file (400 beyond); the files of all requests together may have twice as many (429 beyond)",
        at_least=1,
    )


PATHS = {"/v1/audio/transcriptions": "trsc-", "/v1/audio/translations": "trsl-"}

FEATURE = Feature(
    name="audio",
    help="/v1/audio/transcriptions and /v1/audio/translations, for Whisper models",
    room=__package__,
    settings={"FrontendArgs": AudioFlags},
    parts=(Part("routes", ".routes:install", tasks=("transcription",), paths=PATHS),),
    needs=("whisper", "several_prompts", "child_process"),
    events=("request.language_detected", "request.validated", "sse.chunk"),
)
