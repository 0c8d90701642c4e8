"""return_token_ids, return_prompt_text."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="token_ids",
    help="the token ids of prompts and answers: return_token_ids, return_prompt_text",
    room=__package__,
    parts=(
        Part("request", ".fields:ReturnTokenIds", key="SamplingRequest"),
        Part("request", ".fields:ReturnPromptText", key="ChatCompletionRequest"),
        Part("response", ".fields:PromptTokenIds", key="CompletionChoice"),
        Part("response", ".fields:TokenIds", key="CompletionChoice"),
        Part("response", ".fields:TokenIds", key="ChatChoice"),
        Part("response", ".fields:PromptText", key="ChatCompletionResponse"),
        Part("response", ".fields:PromptText", key="ChatStreamResponse"),
    ),
)
