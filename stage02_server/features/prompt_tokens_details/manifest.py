"""The flag of `prompt_tokens_details`."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class PromptTokensDetailsFlags:
    """Whether answers tell what the prefix cache held."""

    enable_prompt_tokens_details: bool = option(
        False, "tell in the usage how many tokens of the prompt were found in the prefix cache"
    )


FEATURE = Feature(
    name="prompt_tokens_details",
    help="how much of a prompt the prefix cache held, in the usage",
    room=__package__,
    settings={"FrontendArgs": PromptTokensDetailsFlags},
    parts=(
        Part("response", ".fields:PromptTokensDetailsField", key="UsageInfo"),
        Part("answers", ".install:install", flags=("enable_prompt_tokens_details",)),
    ),
)
