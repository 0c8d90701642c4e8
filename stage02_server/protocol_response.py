"""The shapes of answers (vllm/entrypoints/openai: completion/protocol.py, chat_completion/protocol.py); those of requests are in protocol.py."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from stage03_engine.plugins import loaded

WITH_THE_USAGE = {
    "usage",
    *(name for part in loaded("response", "CompletionResponse") for name in part.__annotations__),
}
"""What a stream sends once, at its end."""


class UsageInfo(*loaded("response", "UsageInfo"), BaseModel):  # type: ignore[misc]
    """Tokens that a request took. With n > 1 the prompt counts once."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    total_tokens: int = Field(description="Both.")
    completion_tokens: int = Field(description="Tokens of the answers.")


class PlainChoice(BaseModel):
    """What each answer has, and each piece of one."""

    index: int = Field(description="Its place, from 0.")
    finish_reason: str | None = Field(default=None, description="stop, length, tool_calls, or abort.")
    stop_reason: int | str | None = Field(default=None, description="The stop string or the token that ended it.")


class CompletionChoice(*loaded("response", "CompletionChoice"), PlainChoice):  # type: ignore[misc]
    """One answer, or what a chunk adds to it."""

    text: str = Field(description="The text.")


class PlainCompletionResponse(BaseModel):
    """`CompletionResponse` without what features add."""

    id: str = Field(description="The id of the answer.")
    object: Literal["text_completion"] = Field(default="text_completion", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The name under which the model is served.")
    choices: list[CompletionChoice] = Field(description="The answers.")
    usage: UsageInfo | None = Field(default=None, description="How many tokens the request took.")


class CompletionResponse(*loaded("response", "CompletionResponse"), PlainCompletionResponse):  # type: ignore[misc]
    """The answer of /v1/completions, and each chunk of its stream."""


class PlainMessage(BaseModel):
    """What every answer of a chat holds."""

    role: str = Field(description="Who speaks.")
    content: str | None = Field(description="The text; null if there is none.")

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in serialize(self).items() if v is not None or k == "content"}


class ChatMessage(*loaded("response", "ChatMessage"), PlainMessage):  # type: ignore[misc]
    """The answering message. The JSON leaves out what it lacks: reasoning, tool calls."""


class ChatChoice(*loaded("response", "ChatChoice"), PlainChoice):  # type: ignore[misc]
    """One answer."""

    message: ChatMessage = Field(description="The answer, as a message of the chat.")


class PlainChatCompletionResponse(BaseModel):
    """`ChatCompletionResponse` without what features add."""

    id: str = Field(description="The id of the answer.")
    object: Literal["chat.completion"] = Field(default="chat.completion", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The name under which the model is served.")
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: UsageInfo = Field(description="How many tokens the request took.")


class ChatCompletionResponse(*loaded("response", "ChatCompletionResponse"), PlainChatCompletionResponse):  # type: ignore[misc]
    """The answer of /v1/chat/completions."""


class ChatStreamChoice(*loaded("response", "ChatChoice"), PlainChoice):  # type: ignore[misc]
    """What a chunk adds to one answer."""

    delta: dict[str, Any]  # keys of ChatMessage; a tool call also has its `index` in the answer


class PlainChatStreamResponse(BaseModel):
    """`ChatStreamResponse` without what features add."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: UsageInfo | None = None


class ChatStreamResponse(*loaded("response", "ChatStreamResponse"), PlainChatStreamResponse):  # type: ignore[misc]
    """One chunk of the stream of /v1/chat/completions."""


def streamed(model: type[BaseModel]) -> Any:
    """The same fields as a struct, in no cycle: one is made and written for every token, in a fraction of a model's time. What a
    stream sends once is left out until it is set."""
    fields: list[tuple[str, Any, Any]] = []
    for name, field in model.model_fields.items():
        default = msgspec.NODEFAULT if field.is_required() else field.default
        fields.append((name, field.annotation, msgspec.UNSET if name in WITH_THE_USAGE else default))
    return msgspec.defstruct(f"Streamed{model.__name__}", fields, kw_only=True, gc=False, module=__name__)


def _of_feature(value: Any) -> Any:
    """What a feature put into a chunk may be a model."""
    if isinstance(value, BaseModel):
        return msgspec.Raw(value.model_dump_json().encode())
    raise NotImplementedError


CompletionChunk, CompletionChunkChoice = streamed(CompletionResponse), streamed(CompletionChoice)
ChatChunk, ChatChunkChoice = streamed(ChatStreamResponse), streamed(ChatStreamChoice)
write_chunk = msgspec.json.Encoder(enc_hook=_of_feature).encode_into
"""Write a chunk into a buffer, byte for byte as pydantic writes the model. A buffer from the chunk before has the size already: to
grow from nothing takes as long as to write."""


class ModelCard(BaseModel):
    """A model that requests may name."""

    id: str = Field(description="The name that requests use.")
    object: Literal["model"] = Field(default="model", description="What kind of object this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    owned_by: str = Field(default="vllm-in-stages", description="Who made it known to the server.")
    root: str = Field(description="The model that was loaded.")
    parent: str | None = Field(
        default=None, description="The served model that an adapter belongs to; null for the model itself."
    )
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = Field(default="list", description="What kind of object this is.")
    data: list[ModelCard] = Field(description="What was asked for, in its order.")


class ErrorInfo(BaseModel):
    """What went wrong: `code` is the HTTP status, `param` the field to blame."""

    message: str = Field(description="The reason, in words.")
    type: str = Field(description="The kind of error.")
    param: str | None = Field(default=None, description="The field that is to blame, if it is one.")
    code: int = Field(description="The HTTP status.")


class ErrorResponse(BaseModel):
    """The body of every refusal."""

    error: ErrorInfo = Field(description="What is wrong.")
