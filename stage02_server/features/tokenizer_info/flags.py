"""The flag of the tokenizer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class TokenizerInfoFlags:
    """Whether anybody may read them."""

    enable_tokenizer_info_endpoint: bool = option(
        False, "answer GET /tokenizer_info with the tokenizer's settings, its chat template among them"
    )
