"""The shape of requests to /v1/messages and /v1/messages/count_tokens, and the chats that they mean
(vllm/entrypoints/anthropic/protocol.py).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from stage02_server.features.tools.fields import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    ToolChoice,
    ToolParam,
)
from stage02_server.features.tools.json_values import RepeatedJson
from stage02_server.protocol import (
    ChatCompletionRequest,
    ChatMessageParam,
    ContentPart,
    MessageFunctionCall,
    MessageToolCall,
    RequestModel,
    Salt,
    Stops,
)
from stage02_server.protocol_types import Int32, Int64, ListOf, Text
from stage03_engine.errors import InvalidRequestError

BILLING_HEADER = "x-anthropic-billing-header"
"""How Claude Code begins a system block that differs from request to request: it would spoil the prefix cache. vLLM drops it too."""

MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Role -> the content blocks that its messages may hold."""

ROLES_OF_CLAUDE_CODE = {"ctx": "user", "msg": "user"}
"""Roles that Anthropic does not document and Claude Code sends, and what vLLM takes them for (normalize_role)."""


class ImageSource(BaseModel):
    """Where an image is."""

    type: Text = Field(description="base64 or url.")
    media_type: Text | None = Field(
        default=None, description="Of base64: image/png, image/jpeg, image/gif or image/webp."
    )
    data: Text | None = Field(default=None, description="The file in base64.")
    url: Text | None = Field(
        default=None,
        description="An address at one of --allowed-media-domains, or a file:/// URL below --allowed-local-media-path.",
    )

    def as_url(self) -> str:
        """Raises InvalidRequestError if it is incomplete."""
        if self.type == "url" and self.url is not None:
            return self.url
        if self.type == "base64" and self.data is not None and self.media_type in MEDIA_TYPES:
            return f"data:{self.media_type};base64,{self.data}"
        raise InvalidRequestError(
            f"The source of an image is of type base64, with data and one of {', '.join(MEDIA_TYPES)} as its media_type, or of type url, with url.",
            "messages",
        )


class ResultPart(BaseModel):
    """One part of a tool's result: text, or for a model that sees an image."""

    type: Text = Field(description="What it is.")
    text: Text | None = Field(default=None, description="The text.")
    source: ImageSource | None = Field(default=None, description="Of an image: where it is.")


class AnthropicContentBlock(BaseModel):
    """One block of a message. What its type has no use for is None."""

    type: Text = Field(description="text, image, thinking, redacted_thinking, tool_use or tool_result.")
    text: Text | None = Field(default=None, description="The text.")
    source: ImageSource | None = Field(default=None, description="Of an image: where it is.")
    thinking: Text | None = Field(default=None, description="What the model thought before it answered.")
    id: Text | None = Field(default=None, description="The id of a tool call.")
    name: Text | None = Field(default=None, description="The tool that was called.")
    input: RepeatedJson | None = Field(default=None, description="The arguments of the call.")
    tool_use_id: Text | None = Field(default=None, description="The call whose result this is.")
    content: Text | ListOf[ResultPart] | None = Field(default=None, description="The result of a call.")
    is_error: bool | None = Field(default=None, description="Accepted; the result itself says what failed.")

    def call(self) -> MessageToolCall:
        """A tool_use. Raises InvalidRequestError if it is incomplete."""
        if self.id is None or self.name is None or self.input is None:
            raise InvalidRequestError("A tool_use block needs id, name and input.", "messages")
        arguments = json.dumps(self.input, ensure_ascii=False)
        return MessageToolCall(id=self.id, function=MessageFunctionCall(name=self.name, arguments=arguments))

    def result(self) -> ChatMessageParam:
        """A tool_result. Raises InvalidRequestError if it is incomplete, or not text."""
        if self.tool_use_id is None:
            raise InvalidRequestError("A tool_result block needs tool_use_id.", "messages")
        content: Any = self.content or ""
        if not isinstance(content, str):
            content = _content([_part_of(part) for part in content])
        return ChatMessageParam(role="tool", content=content, tool_call_id=self.tool_use_id)


def _text_of(block: AnthropicContentBlock | ResultPart) -> str:
    if block.type != "text":
        raise InvalidRequestError(
            f"Only text can be served, not a content block of type {block.type[:50]!r}.", "messages"
        )
    if block.text is None:
        raise InvalidRequestError("A text block needs text.", "messages")
    return block.text


def _part_of(block: AnthropicContentBlock | ResultPart) -> str | ContentPart:
    """A text, or an image as a chat knows it. Raises InvalidRequestError."""
    if block.type != "image":
        return _text_of(block)
    if block.source is None:
        raise InvalidRequestError("An image block needs source.", "messages")
    return ContentPart.model_validate({"type": "image_url", "image_url": block.source.as_url()})


def _content(said: list[str | ContentPart]) -> str | list[ContentPart | str]:
    """Texts and images as the content of one message of a chat."""
    if len(said) == 1 and isinstance(said[0], str):
        return said[0]
    return [ContentPart(type="text", text=each) if isinstance(each, str) else each for each in said]


class AnthropicMessage(BaseModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: Text | ListOf[AnthropicContentBlock] = Field(description="A text, or a list of blocks.")

    @field_validator("role", mode="before")
    @classmethod
    def _documented(cls, role: Any) -> Any:
        return ROLES_OF_CLAUDE_CODE.get(role, role) if isinstance(role, str) else role

    def as_chat(self) -> list[ChatMessageParam]:
        """The same as messages of a chat, where the result of each call is a message of its own. Raises
        InvalidRequestError for what cannot be served."""
        if isinstance(self.content, str):
            return [ChatMessageParam(role=self.role, content=self.content)]
        for block in self.content:
            if block.type not in BLOCKS[self.role]:
                known = any(block.type in kinds for kinds in BLOCKS.values())
                where = f" in a message of role {self.role!r}" if known else ""
                raise InvalidRequestError(
                    f"Only text can be served, not a content block of type {block.type[:50]!r}{where}.", "messages"
                )
        results = [block.result() for block in self.content if block.type == "tool_result"]
        said = [part for block in self.content if block.type in ("text", "image") and (part := _part_of(block))]
        calls = [block.call() for block in self.content if block.type == "tool_use"]
        thoughts = [block.thinking for block in self.content if block.thinking]
        spoken: dict[str, Any] = {"content": _content(said)} if said else {}
        if calls:
            spoken["tool_calls"] = calls
        if thoughts:
            spoken["reasoning"] = "".join(thoughts)
        if spoken or not results:
            results.append(ChatMessageParam(role=self.role, **({"content": None} | spoken)))
        return results


class AnthropicTool(BaseModel):
    """A tool that the client runs."""

    name: str = Field(min_length=1, max_length=128, description="Its name.")
    type: Text | None = Field(default=None, description='"custom", or left out.')
    description: Text | None = Field(
        default=None, description="What it is for; the chat template may show it to the model."
    )
    input_schema: dict[str, Any] | None = Field(default=None, description="A JSON schema of the arguments.")
    strict: bool | None = Field(default=None, description="Accepted; a grammar is used where a call is forced.")

    def as_chat(self) -> ToolParam:
        """Raises InvalidRequestError for a tool that the client does not run itself."""
        if self.type not in (None, "custom"):
            raise InvalidRequestError(
                f"tools: this server runs no tools, so there is no {self.type[:50]!r}; the client's own have an input_schema.",
                "tools",
            )
        if self.input_schema is None:
            raise InvalidRequestError("tools: a tool needs an input_schema.", "tools")
        schema = self.input_schema if "type" in self.input_schema else {"type": "object"} | self.input_schema
        described = {} if self.description is None else {"description": self.description}
        return ToolParam(function=FunctionDefinition(name=self.name, parameters=schema, **described))


class AnthropicToolChoice(BaseModel):
    """Which of the tools the model must call."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="auto, any, none, or one tool by its name.")
    name: Text | None = Field(default=None, description="The tool that must be called.")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="Whether an answer may have one call at most."
    )

    def as_chat(self) -> ToolChoice:
        """Raises InvalidRequestError for type "tool" without a name."""
        if self.type == "tool":
            if self.name is None:
                raise InvalidRequestError('tool_choice of type "tool" needs a name.', "tool_choice")
            return NamedToolChoice(function=FunctionName(name=self.name))
        return "required" if self.type == "any" else self.type


class ThinkingConfig(BaseModel):
    """Whether the answer tells what the model thought. How much it thinks is up to the model and its chat template."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description='"disabled" leaves thinking out of the answer.'
    )
    budget_tokens: Int32 | None = Field(default=None, description="Accepted, and not used.")
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        default=None, description='"omitted" leaves thinking out of the answer; nothing is summarized.'
    )

    @property
    def is_told(self) -> bool:
        """False if the answer shall hold no thinking."""
        return self.type != "disabled" and self.display != "omitted"


class JsonOutputFormat(BaseModel):
    """A JSON schema that the answer must follow."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"] = Field(default="json_schema", description="What it is.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The JSON schema.")


class OutputConfig(BaseModel):
    """What form the answer has, and how much the model shall think."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="How much the model shall think; the chat template sees it."
    )
    format: JsonOutputFormat | None = Field(default=None, description="A JSON schema that the answer must follow.")


class AnthropicCountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens."""

    refused: ClassVar[str] = "messages"

    model: str = Field(min_length=1, max_length=1024, description="A name that /v1/models tells.")
    messages: ListOf[AnthropicMessage] = Field(description="The oldest message first.")
    system: Text | ListOf[AnthropicContentBlock] | None = Field(
        default=None, description="What holds for all messages."
    )
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="Tools that the model may call, and the client runs."
    )
    tool_choice: AnthropicToolChoice | None = Field(
        default=None, description="Which of them must be called; the model decides if it is left out."
    )
    thinking: ThinkingConfig | None = Field(
        default=None, description="Whether the answer tells what --reasoning-parser takes for reasoning."
    )
    output_config: OutputConfig | None = Field(default=None, description="What form the answer has.")
    chat_template_kwargs: dict[Text, Any] | None = Field(default=None, description="Variables for the chat template.")

    def as_chat(self) -> ChatCompletionRequest:
        """The request as a chat. Raises InvalidRequestError, and RequestValidationError for a value that no chat takes."""
        self.check_built()
        fields = {name: value for name, value in self._chat_fields().items() if value is not None}
        try:
            return ChatCompletionRequest(**fields)
        except ValidationError as error:
            details = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
            raise RequestValidationError(details) from None

    def _chat_fields(self) -> dict[str, Any]:
        tools, choice = [tool.as_chat() for tool in self.tools or []], self.tool_choice
        alone = bool(tools) and choice is not None and choice.disable_parallel_tool_use
        return {
            "model": self.model,
            "messages": self._chat_messages(),
            "tools": tools or None,
            "tool_choice": None if choice is None else choice.as_chat(),
            "parallel_tool_calls": False if alone else None,
            "include_reasoning": None if self.thinking is None else self.thinking.is_told,
            "reasoning_effort": self.output_config and self.output_config.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def _chat_messages(self) -> list[ChatMessageParam]:
        """Raises InvalidRequestError, also for the result of a call that was not made."""
        messages = [part for message in self.messages for part in message.as_chat()]
        called: set[str | None] = set()
        for message in messages:
            called.update(call.id for call in message.tool_calls or [])
            if message.tool_call_id is not None and message.tool_call_id not in called:
                raise InvalidRequestError(
                    "A tool_result block needs the tool_use block with its id in an earlier message.", "messages"
                )
        system = self._system()
        return [ChatMessageParam(role="system", content=system), *messages] if system and messages else messages

    def _system(self) -> str:
        blocks = [self.system] if isinstance(self.system, str) else [_text_of(block) for block in self.system or []]
        return "".join(text for text in blocks if not text.startswith(BILLING_HEADER))


class AnthropicMessagesRequest(AnthropicCountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[Int64, Field(ge=1)] = Field(description="Most tokens of the answer.")
    stop_sequences: Stops | None = Field(default=None, description="Up to four texts; the answer ends before them.")
    stream: bool | None = Field(default=False, description="Send the answer piece by piece, as server-sent events.")
    temperature: FiniteFloat | None = Field(default=None, description="0 takes the likeliest token each time.")
    top_p: FiniteFloat | None = Field(
        default=None, description="Draw from the likeliest tokens up to this probability."
    )
    top_k: Int32 | None = Field(
        default=None, description="Draw from so many of the likeliest tokens; 0 and -1 take all."
    )
    metadata: dict[Text, Any] | None = Field(default=None, description="Accepted, and not used.")
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="Accepted; there is one kind of service."
    )
    cache_salt: Salt | None = Field(default=None, description="Only requests with the same salt share cached prefixes.")
    vllm_xargs: dict[Text, Any] | None = Field(default=None, description="Arguments for own logits processors.")

    def _chat_fields(self) -> dict[str, Any]:
        fields = super()._chat_fields()
        form = None if self.output_config is None else self.output_config.format
        if form is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt", "vllm_xargs")
        return fields | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}


NAMES_HERE = {"stop": "stop_sequences", "response_format": "output_config.format", "prompt": "messages"}
"""Field that the shared checks blame -> what the client of this endpoint calls it."""


def in_words_of_messages(error: InvalidRequestError) -> InvalidRequestError:
    """The same refusal, with the names that this endpoint's fields have."""
    param, text = error.param or "", str(error)
    if param == "messages" and text.startswith("image_url: "):  # an image has a source here
        return InvalidRequestError(f"source: {text.removeprefix('image_url: ')}", param)
    if param not in NAMES_HERE:
        return error
    if text.startswith(param):
        text = NAMES_HERE[param] + text.removeprefix(param)
    return InvalidRequestError(text, NAMES_HERE[param])
