"""What Whisper changes in the configuration: it has no flags, but refuses some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.model_path import ModelFiles

ARCHITECTURE = "WhisperForConditionalGeneration"
_ALLOWED = {
    "runner": ("auto", "generate"), "convert": ("auto", "none"), "speculative_config": (None,), "quantization": (None,),
}  # fmt: skip


class WhisperFlags:
    """Part of VllmConfig."""

    @property
    def is_whisper(self: Any) -> bool:
        """True for a model that turns speech into text."""
        return self.shape.architecture == ARCHITECTURE

    @staticmethod
    def tasks(config: VllmConfig) -> tuple[str, ...]:
        """Speech to text, and nothing else."""
        return ("transcription", "translation") if config.is_whisper else ()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
        """Adds nothing. Raises ConfigError for settings of other features that Whisper cannot use."""
        if files.shape.architecture == ARCHITECTURE and any(
            values.get(name, allowed[0]) not in allowed for name, allowed in _ALLOWED.items()
        ):
            raise ConfigError(
                "a Whisper model only transcribes speech: leave out runner, convert, speculative_config and quantization"
            )
        if files.shape.architecture == ARCHITECTURE and files.load_format not in ("auto", "safetensors", "dummy"):
            raise ConfigError(
                f"the weights of Whisper are read from safetensors, not with load_format {files.load_format}"
            )
        return {}


FEATURE = Feature(
    name="whisper",
    help="speech to text: Whisper models, /v1/audio/transcriptions and /v1/audio/translations",
    room=__package__,
    also=("stage03_engine.params.audio",),
    settings={"VllmConfig": WhisperFlags},
    parts=(
        Part("architecture", ".config_json:read_whisper", key=ARCHITECTURE, model_type="whisper"),
        Part("core", ".whisper_core:WhisperCore", key="transcription"),
    ),
    needs=("model_formats",),
    events=("whisper.aligned", "whisper.encoded", "whisper.loaded"),
)
