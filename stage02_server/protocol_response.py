"""The shapes of answers (vllm/entrypoints/openai/protocol.py); those of requests are in protocol.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from stage03_engine.mixins import mixins

METRICS = mixins("stage02_server.features.per_request_metrics.fields:MetricsField")
WITH_THE_USAGE = {"usage", *(name for part in METRICS for name in part.model_fields)}
"""What a stream tells once, at its end."""


class TokenizeResponse(BaseModel):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of token ids."""

    prompt: str


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens were found in the prefix cache, and so cost nothing."""

    cached_tokens: int


class UsageInfo(BaseModel):
    """Tokens that a request took. With n > 1 the prompt counts once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogProbs(BaseModel):
    """Four lists of equal length, one entry per token. `text_offset` counts characters of the answer's text. Nothing
    predicts the first token of an echoed prompt: its logprobs are None."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class PromptLogprob(BaseModel):
    """A token that stands at a place of the prompt, or could have: `rank` 1 is the most likely one there."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None  # of the answer, without an echoed prompt
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None  # in a stream with the first chunk of each answer


class PlainCompletionResponse(BaseModel):
    """`CompletionResponse` without what features add."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class CompletionResponse(*METRICS, PlainCompletionResponse):  # type: ignore[misc]
    """The answer of /v1/completions, and each chunk of its stream."""


class TokenLogProb(BaseModel):
    """A token with its log-probability. `bytes` are there because a token may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogProb(TokenLogProb):
    """The token at one position, and the most likely ones there."""

    top_logprobs: list[TokenLogProb] = []


class ChatLogProbs(BaseModel):
    """One entry per output token."""

    content: list[ChatLogProb]


class PlainMessage(BaseModel):
    """What every answering message holds."""

    role: str
    content: str | None

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in serialize(self).items() if v is not None or k == "content"}


class ChatMessage(*mixins("stage02_server.features.tools.fields:MessageFields"), PlainMessage):  # type: ignore[misc]
    """The answering message. What it has none of (reasoning, tool calls) is left out of the JSON."""


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class PlainChatCompletionResponse(BaseModel):
    """`ChatCompletionResponse` without what features add."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class ChatCompletionResponse(*METRICS, PlainChatCompletionResponse):  # type: ignore[misc]
    """The answer of /v1/chat/completions."""


class ChatStreamChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: dict[str, Any]  # keys of ChatMessage; a tool call also says its place, `index`, among those of the answer
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class PlainChatStreamResponse(BaseModel):
    """`ChatStreamResponse` without what features add."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None  # with the first chunk of each answer
    prompt_text: str | None = None  # likewise


class ChatStreamResponse(*METRICS, PlainChatStreamResponse):  # type: ignore[misc]
    """One chunk of the stream of /v1/chat/completions."""


class ModelCard(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm-in-stages"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorInfo(BaseModel):
    """What went wrong: `code` is the HTTP status, `param` the field to blame."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(BaseModel):
    """The body of every refusal."""

    error: ErrorInfo
