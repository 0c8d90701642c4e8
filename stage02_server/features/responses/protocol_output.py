"""The shapes of answers of /v1/responses (vllm/entrypoints/openai/responses/protocol.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from stage02_server.features.logprobs.fields import ChatLogProb
from stage03_engine.plugins import loaded

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = Field(default="output_text", description="What it is.")
    text: str = Field(default="", description="The text.")
    annotations: list[Any] = Field(default=[], description="None are made here.")
    logprobs: list[ChatLogProb] = Field(default=[], description="The log-probabilities that were asked for.")


class OutputMessage(BaseModel):
    """What the model says."""

    type: Literal["message"] = Field(default="message", description="What it is.")
    id: str = Field(description="The id of the answer.")
    role: Literal["assistant"] = Field(default="assistant", description="Who speaks.")
    status: ItemStatus = Field(
        default="in_progress", description="queued, in_progress, completed, incomplete, failed or cancelled."
    )
    content: list[OutputText] = Field(default=[], description="The parts of the message.")


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = Field(default="reasoning_text", description="What it is.")
    text: str = Field(default="", description="The text.")


class ReasoningItem(BaseModel):
    """What the model thinks before it says something. Nobody writes a summary of it."""

    type: Literal["reasoning"] = Field(default="reasoning", description="What it is.")
    id: str = Field(description="The id of the answer.")
    summary: list[Any] = Field(default=[], description="Summaries are not written.")
    content: list[ReasoningText] = Field(default=[], description="The parts of the reasoning.")
    encrypted_content: None = Field(default=None, description="Nothing is encrypted here.")
    status: ItemStatus = Field(
        default="in_progress", description="queued, in_progress, completed, incomplete, failed or cancelled."
    )


class FunctionCallItem(BaseModel):
    """The function that the model calls; `arguments` is JSON as the model wrote it, valid or not."""

    type: Literal["function_call"] = Field(default="function_call", description="What it is.")
    id: str = Field(description="The id of the answer.")
    call_id: str = Field(description="Which call; its result has the same.")
    name: str = Field(description="Its name.")
    arguments: str = Field(default="", description="The arguments of the call, as JSON in a text.")
    status: ItemStatus = Field(
        default="in_progress", description="queued, in_progress, completed, incomplete, failed or cancelled."
    )


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """How many tokens of the input were found in the prefix cache. Writing into it is never counted."""

    cached_tokens: int = Field(description="Tokens that were found in the prefix cache.")
    cache_write_tokens: int = Field(default=0, description="Not counted here.")


class OutputTokensDetails(BaseModel):
    """How many tokens of the output were reasoning: as many as the tokenizer needs for its text."""

    reasoning_tokens: int = Field(description="Tokens of the reasoning.")


class ResponseUsage(BaseModel):
    """Tokens that a response took."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: InputTokensDetails = Field(description="How many of them were in the prefix cache.")
    output_tokens: int = Field(description="Tokens of the answer.")
    output_tokens_details: OutputTokensDetails = Field(description="How many of them were reasoning.")
    total_tokens: int = Field(description="Both.")


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str = Field(description="The HTTP status.")
    message: str = Field(description="What is wrong, in words.")


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: str = Field(description="max_output_tokens, or what else it was.")


class ResponseProgress(*loaded("response", "ResponseProgress"), BaseModel):  # type: ignore[misc]
    """The fields of `ResponsesResponse` that change while it is made."""

    id: str
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None


class PlainResponsesResponse(BaseModel):
    """`ResponsesResponse` without what features add."""

    id: str = Field(description="The id of the answer.")
    object: Literal["response"] = Field(default="response", description="What kind of object this is.")
    created_at: int = Field(description="When it was asked for, in seconds since 1970.")
    completed_at: int | None = Field(default=None, description="When it was complete, in seconds since 1970.")
    status: Status = Field(description="queued, in_progress, completed, incomplete, failed or cancelled.")
    background: bool = Field(description="Whether it was made in the background.")
    error: ResponseError | None = Field(default=None, description="What is wrong.")
    incomplete_details: IncompleteDetails | None = Field(default=None, description="Why it was cut short.")
    instructions: str | None = Field(description="A system message for this response only.")
    max_output_tokens: int | None = Field(description="Most tokens of the answer, its reasoning included.")
    max_tool_calls: int | None = Field(description="Most calls of tools that the server runs; it runs none.")
    metadata: dict[str, str] = Field(description="Up to 16 texts by name, which the answer repeats.")
    model: str = Field(description="The name under which the model is served.")
    output: list[OutputItem] = Field(default=[], description="The items of the answer.")
    parallel_tool_calls: bool = Field(description="Whether an answer may have more than one call.")
    previous_response_id: str | None = Field(description="The stored response whose conversation goes on.")
    reasoning: dict[str, str | None] | None = Field(description="How much the model was to think.")
    service_tier: str = Field(default="default", description="Accepted; there is one kind of service.")
    store: bool = Field(description="Keep the response for later requests.")
    temperature: float = Field(description="0 takes the likeliest token each time; higher values draw more freely.")
    text: dict[str, Any] = Field(description="What form the text has.")
    tool_choice: str | dict[str, Any] = Field(description="none, auto, required, or one function by its name.")
    tools: list[dict[str, Any]] = Field(description="Functions that the model may call.")
    top_logprobs: int = Field(description="The likeliest tokens in this place, with theirs.")
    top_p: float = Field(description="Draw only from the likeliest tokens that together have this probability.")
    truncation: str = Field(description='With "auto", a prompt that is too long loses its beginning.')
    usage: ResponseUsage | None = Field(default=None, description="How many tokens the request took.")
    user: str | None = Field(default=None, description="Accepted, and not used.")


class DeletedResponse(BaseModel):
    """What is said of a response that has been deleted."""

    id: str = Field(description="Its id.")
    object: Literal["response"] = Field(default="response", description="What kind of object this was.")
    deleted: Literal[True] = Field(default=True, description="It is forgotten.")


class ResponsesResponse(*loaded("response", "ResponsesResponse"), PlainResponsesResponse):  # type: ignore[misc]
    """The answer of /v1/responses: what was asked for, how far it has come, and the output when it is there."""
