"""The flag of the tokenizer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class TokenizerInfoFlags:
    """Whether anybody may read them."""

    enable_tokenizer_info_endpoint: bool = option(
        False, "answer GET /tokenizer_info with the tokenizer's settings, its chat template among them"
    )


FEATURE = Feature(
    name="tokenizer_info",
    help="/tokenizer_info: the tokenizer's settings and the chat template",
    room=__package__,
    settings={"FrontendArgs": TokenizerInfoFlags},
    parts=(Part("routes", ".routes:install", flags=("enable_tokenizer_info_endpoint",)),),
)
