"""The parts of a chat request: messages, tools, and what the chat template is told (vllm/entrypoints/openai/protocol.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.protocol_types import Text

MAX_TOOLS = 128


class ContentPart(BaseModel):
    """One part of a message's content; only text can be served."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    thinking: Text | None = None


class MessageFunctionCall(BaseModel):
    """What an earlier answer called: `arguments` is JSON in a text."""

    name: Text
    arguments: Text | None = None


class MessageToolCall(BaseModel):
    """A tool call of an earlier answer."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: MessageFunctionCall


class ChatMessageParam(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Text | list[ContentPart | Text] | None = None
    name: Text | None = None
    tool_calls: list[MessageToolCall] | None = None  # of role assistant
    tool_call_id: Text | None = None  # of role tool: which call this is the result of
    reasoning: Text | None = None  # of role assistant
    reasoning_content: Text | None = None  # its older name


class FunctionDefinition(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: Text = Field(min_length=1, max_length=128)
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(BaseModel):
    """A tool; only functions exist."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(BaseModel):
    """The name of a function."""

    name: Text


class NamedToolChoice(BaseModel):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatTemplateFields(BaseModel):
    """What the chat template is told besides the messages."""

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: Text | None = None  # instead of the server's; off unless --trust-request-chat-template
    chat_template_kwargs: dict[Text, Any] | None = None  # further variables for the template
    documents: list[dict[Text, Any]] | None = None
    reasoning_effort: Text | None = None
    tools: list[ToolParam] | None = Field(default=None, max_length=MAX_TOOLS)
