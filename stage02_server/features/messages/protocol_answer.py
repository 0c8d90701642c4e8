"""The shape of answers of /v1/messages (vllm/entrypoints/anthropic/protocol.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from stage03_engine.plugins import loaded


class AnthropicUsage(BaseModel):
    """Tokens that a request took. The prompt has `input_tokens` and `cache_read_input_tokens` together, as with Anthropic."""

    input_tokens: int = Field(description="Tokens of the prompt that had to be computed.")
    output_tokens: int = Field(description="Tokens of the answer.")
    cache_creation_input_tokens: int = Field(default=0, description="Always 0: the cache keeps prompts unasked.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were in the prefix cache.")


class TextBlock(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = Field(default="text", description="What it is.")
    text: str = Field(default="", description="The text.")


class ThinkingBlock(BaseModel):
    """What --reasoning-parser takes for reasoning."""

    type: Literal["thinking"] = Field(default="thinking", description="What it is.")
    thinking: str = Field(default="", description="What the model thought before it answered.")
    signature: str = Field(default="", description="A random text; nothing checks it.")


class ToolUseBlock(BaseModel):
    """A call of one of the request's tools."""

    type: Literal["tool_use"] = Field(default="tool_use", description="What it is.")
    id: str = Field(description="The id of the call, which its result repeats.")
    name: str = Field(description="The tool that is called.")
    input: dict[str, Any] = Field(
        default={}, description="The arguments; INVALID_JSON holds them as text if they are not valid, or were cut."
    )


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class PlainMessagesResponse(BaseModel):
    """`AnthropicMessagesResponse` without what features add."""

    id: str = Field(description="The id of the answer.")
    type: Literal["message"] = Field(default="message", description="What kind of object this is.")
    role: Literal["assistant"] = Field(default="assistant", description="Who speaks.")
    model: str = Field(description="The name under which the model is served.")
    content: list[Block] = Field(description="The blocks of the answer, in their order.")
    stop_reason: StopReason | None = Field(
        default=None, description="Why the answer ended: end_turn, max_tokens, stop_sequence or tool_use."
    )
    stop_sequence: str | None = Field(default=None, description="The stop sequence that ended it.")
    usage: AnthropicUsage = Field(description="How many tokens the request took.")


class AnthropicMessagesResponse(*loaded("response", "AnthropicMessagesResponse"), PlainMessagesResponse):  # type: ignore[misc]
    """The answer of /v1/messages."""


class AnthropicContextManagement(BaseModel):
    """What was done to the prompt before it was counted: nothing."""

    original_input_tokens: int = Field(description="The same number.")


class AnthropicCountTokensResponse(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    context_management: AnthropicContextManagement = Field(description="What it would be without any cuts.")


class AnthropicError(BaseModel):
    """What went wrong."""

    type: str = Field(description="The kind of error.")
    message: str = Field(description="What is wrong, and what to do.")


class AnthropicErrorResponse(BaseModel):
    """The body of every refusal."""

    type: Literal["error"] = Field(default="error", description="What kind of object this is.")
    error: AnthropicError = Field(description="What is wrong.")
