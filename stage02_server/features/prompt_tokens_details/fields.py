"""The field `prompt_tokens_details` of the usage (vllm/entrypoints/serve/engine/protocol.py, PromptTokenUsageInfo)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens were found in the prefix cache, and so cost nothing."""

    cached_tokens: int = Field(description="Tokens that were found in the prefix cache.")


class PromptTokensDetailsField(BaseModel):
    """In a stream only the last usage has it."""

    prompt_tokens_details: PromptTokensDetails | None = Field(
        default=None, description="How many of them were in the prefix cache; with --enable-prompt-tokens-details."
    )
