"""`--skip-tokenizer-init`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class SkipTokenizerInit:
    """Part of ModelConfig."""

    skip_tokenizer_init: bool = option(
        False,
        "no tokenizer: prompts come as token ids, and answers are token ids (return_token_ids), their text is empty",
    )


class SkipTokenizerFlags:
    """Part of VllmConfig."""

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a model whose prompts only a tokenizer can make."""
        if config.model_config.skip_tokenizer_init and "transcription" in config.supported_tasks:
            raise ConfigError("skip_tokenizer_init: the prompts of Whisper are made with its tokenizer")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """What needs text is refused in each request."""
        if not config.model_config.skip_tokenizer_init:
            return {}
        return {"input": ["stage03_engine.frontend.features.skip_tokenizer.no_tokenizer:WithoutTextHook"]}


FEATURE = Feature(
    name="skip_tokenizer",
    help="an engine of token ids alone, without a tokenizer",
    room=__package__,
    settings={"ModelConfig": SkipTokenizerInit, "VllmConfig": SkipTokenizerFlags},
    parts=(Part("engine", ".no_tokenizer:NoTokenizer", key="no_tokenizer", flags=("skip_tokenizer_init",)),),
)
