"""The items of `input` of /v1/responses, and the messages of a chat that they amount to
(vllm/entrypoints/openai/responses/utils.py, construct_input_messages).

An answer of a chat is one message: reasoning, content and tool calls together. Here each of them is an item of its own, so
the items of one turn are put together again.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from stage02_server.protocol_chat import ChatMessageParam, ContentPart, MessageFunctionCall, MessageToolCall
from stage02_server.protocol_types import Text
from stage03_engine.errors import InvalidRequestError

OBJECT_CHARACTERS = 600  # what an item or a part takes in memory besides its text, as so many bytes


class InputPart(BaseModel):
    """One part of an item's content; only text can be served."""

    type: Text
    text: Text | None = None


class InputItem(BaseModel):
    """One item of `input`, which may also be one of an earlier answer's `output`. What its type has no use for is None."""

    type: Text | None = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | list[InputPart] | None = None  # of a message or of reasoning
    call_id: Text | None = None  # of a function call and of its output
    name: Text | None = None
    arguments: Text | None = None
    output: Text | list[InputPart] | None = None
    summary: list[InputPart] | None = None  # of reasoning
    encrypted_content: Text | None = None

    @property
    def characters(self) -> int:
        """How much room it takes, about: its text, and what holds it."""
        fields = (self.content, self.arguments, self.output, self.summary, self.call_id, self.name)
        texts = [text for text in fields if text]
        return OBJECT_CHARACTERS + sum(
            len(t) if isinstance(t, str) else sum(OBJECT_CHARACTERS + len(part.text or "") for part in t) for t in texts
        )

    def message(self) -> ChatMessageParam:
        """The item as a message of a chat. Raises InvalidRequestError for what is not text."""
        if self.type in (None, "message"):
            return self._spoken()
        if self.type == "reasoning":
            return self._reasoning()
        if self.type == "function_call":
            if self.call_id is None or self.name is None:
                raise InvalidRequestError("A function_call needs call_id and name.", "input")
            function = MessageFunctionCall(name=self.name, arguments=self.arguments)
            return ChatMessageParam(role="assistant", tool_calls=[MessageToolCall(id=self.call_id, function=function)])
        if self.type == "function_call_output":
            if self.call_id is None or self.output is None:
                raise InvalidRequestError("A function_call_output needs call_id and output.", "input")
            return ChatMessageParam(role="tool", content=_texts(self.output, "input_text"), tool_call_id=self.call_id)
        raise InvalidRequestError(
            f"An item of type {self.type[:50]!r} cannot be served; there are message, reasoning, function_call and "
            "function_call_output.",
            "input",
        )

    def _spoken(self) -> ChatMessageParam:
        if self.role is None or self.content is None:
            raise InvalidRequestError("A message needs role and content.", "input")
        # The role of an instruction is called developer here; chat templates know it as system.
        role = "system" if self.role == "developer" else self.role
        return ChatMessageParam(role=role, content=_texts(self.content, "input_text", "output_text"))

    def _reasoning(self) -> ChatMessageParam:
        """Its text, or the summary of it if that is all there is."""
        if self.encrypted_content is not None:
            raise InvalidRequestError("Reasoning cannot be read here when it is encrypted.", "input")
        content = _texts(self.content or self.summary or "", "reasoning_text", "summary_text")
        text = (
            content
            if isinstance(content, str)
            else "\n".join(part if isinstance(part, str) else part.text or "" for part in content)
        )
        return ChatMessageParam(role="assistant", reasoning=text)


def _texts(content: str | list[InputPart], *types: str) -> str | list[ContentPart | str]:
    """Content as a chat knows it. Raises InvalidRequestError for a part that is of none of these types."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in types or part.text is None:
            raise InvalidRequestError(
                f"Only text can be served, not a content part of type {part.type[:50]!r}.", "input"
            )
    return [ContentPart(type="text", text=part.text) for part in content]


def to_messages(items: list[InputItem]) -> list[ChatMessageParam]:
    """A conversation as a chat. Raises InvalidRequestError for what is not text, and for the result of a call that nobody
    made."""
    messages: list[ChatMessageParam] = []
    called: set[str] = set()
    for item in items:
        message = item.message()
        called.update(call.id for call in message.tool_calls or [] if call.id is not None)
        if message.tool_call_id is not None and message.tool_call_id not in called:
            raise InvalidRequestError(
                "A function_call_output needs the function_call with its call_id before it, in input or in the previous "
                "response.",
                "input",
            )
        if messages and _goes_on(messages[-1], message):
            message = _together(messages.pop(), message)
        messages.append(message)
    return messages


def _place(message: ChatMessageParam) -> int:
    """How far a turn of the assistant has come with this: reasoning, content, calls."""
    return 2 if message.tool_calls else 0 if message.content is None else 1


def _goes_on(last: ChatMessageParam, message: ChatMessageParam) -> bool:
    """Is `message` more of the same turn? Several calls are one turn; anything else that comes twice is two."""
    same = last.role == message.role == "assistant"
    return same and (_place(message) > _place(last) or bool(message.tool_calls))


def _together(last: ChatMessageParam, message: ChatMessageParam) -> ChatMessageParam:
    return ChatMessageParam(
        role="assistant",
        reasoning=last.reasoning,
        content=message.content if last.content is None else last.content,
        tool_calls=[*(last.tool_calls or []), *(message.tool_calls or [])] or None,
    )
