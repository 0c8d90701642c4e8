"""Which engine core a model gets."""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.whisper.whisper_core import WhisperCore


def make_core(config: VllmConfig) -> EngineCore | WhisperCore:
    """The core for the configured model. Raises ConfigError."""
    return WhisperCore(config) if config.is_whisper else EngineCore(config)
