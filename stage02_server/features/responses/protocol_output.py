"""The shapes of answers of /v1/responses (vllm/entrypoints/openai/responses/protocol.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from stage02_server.protocol_response import METRICS, ChatLogProb

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogProb] = []


class OutputMessage(BaseModel):
    """What the model says."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class ReasoningItem(BaseModel):
    """What the model thinks before it says something. Nobody writes a summary of it."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: ItemStatus = "in_progress"


class FunctionCallItem(BaseModel):
    """The function that the model calls; `arguments` is JSON as the model wrote it, valid or not."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """How many tokens of the input were found in the prefix cache. Writing into it is never counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """How many tokens of the output were reasoning: as many as the tokenizer needs for its text."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens that a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: str


class PlainResponsesResponse(BaseModel):
    """`ResponsesResponse` without what features add."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None] | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponsesResponse(*METRICS, PlainResponsesResponse):  # type: ignore[misc]
    """The answer of /v1/responses: what was asked for, how far it has come, and the output when it is there."""
