"""The shapes of answers (vllm/entrypoints/openai/protocol.py); those of requests are in protocol.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from stage02_server.features.per_request_metrics import PerRequestMetrics


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


class CompletionResponse(BaseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
    metrics: PerRequestMetrics | None = None  # in a stream with the usage


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


class FunctionCall(BaseModel):
    """The function that the model calls; `arguments` is JSON as the model wrote it, valid or not."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call of the answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """The answering message. What it has none of (reasoning, tool calls) is left out of the JSON."""

    role: str
    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in serialize(self).items() if v is not None or k == "content"}


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: PerRequestMetrics | None = None


class ChatStreamChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: dict[str, Any]  # keys of ChatMessage; a tool call also says its place, `index`, among those of the answer
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatStreamResponse(BaseModel):
    """One chunk of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None  # with the first chunk of each answer
    prompt_text: str | None = None  # likewise
    metrics: PerRequestMetrics | None = None  # with the usage


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
