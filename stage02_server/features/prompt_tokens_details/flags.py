"""The flag of `prompt_tokens_details`."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class PromptTokensDetailsFlags:
    """Whether answers tell what the prefix cache held."""

    enable_prompt_tokens_details: bool = option(
        False, "tell in the usage how many tokens of the prompt were found in the prefix cache"
    )
