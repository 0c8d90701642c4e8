"""The shapes of requests (vllm/entrypoints/openai: completion/protocol.py, chat_completion/protocol.py); those of answers are in protocol_response.py.

pydantic checks the form of a request. Unknown fields are ignored, as in vLLM, except those that are listed as
refused: ignoring one of these would silently give a different answer from the one that was asked for. A feature declares
its fields in its own `fields.py`, and names them in its manifest.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from stage02_server.middleware import ACCEPTED_ID
from stage02_server.protocol_types import ContentKind, Int32, Int64, ListOf, RequestFields, Several, Text, TokenIds
from stage03_engine.args.unknown import check_unknown_fields
from stage03_engine.errors import InvalidRequestError
from stage03_engine.plugins import keys, loaded, wanted
from stage03_engine.sampling_params import MAX_STOP_STRINGS, RequestOutputKind, SamplingParams

_SAME_NAME = ("n", "temperature", "top_p", "top_k", "seed")
"""Fields that go into `SamplingParams` as they are; None means the default there."""


class RequestModel(*loaded("request", "RequestModel"), BaseModel):  # type: ignore[misc]
    """A request body. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow")
    refused: ClassVar[str] = "request"  # the table of fields that are known and refused
    features: ClassVar[tuple[type[RequestFields], ...]] = ()  # whose fields the request has

    model: Text | None = Field(default=None, description="A name that /v1/models lists; the served model if omitted.")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        parts = [part for part in cls.__mro__ if issubclass(part, RequestFields) and not issubclass(part, RequestModel)]
        cls.features = tuple(part for part in parts if part is not RequestFields)

    def used_features(self) -> list[type[RequestFields]]:
        """The features whose fields the client set."""
        return [part for part in self.features if part.model_fields.keys() & self.model_fields_set]

    def check_built(self) -> None:
        """Raises InvalidRequestError for a known field that this server does not support."""
        if self.model_extra:
            check_unknown_fields(self.model_extra, self.refused)


Stops = Annotated[ListOf[Text], Field(max_length=MAX_STOP_STRINGS)]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
RequestId = Annotated[str, Field(pattern=f"^{ACCEPTED_ID.pattern}$")]


class SamplingRequest(*loaded("request", "SamplingRequest"), RequestModel):  # type: ignore[misc]
    """What completions and chats have in common. None means the default of `SamplingParams`."""

    n: Int32 | None = Field(default=1, description="Number of answers to each prompt.")
    temperature: FiniteFloat | None = Field(default=None, description="0 takes the likeliest token each time.")
    top_p: FiniteFloat | None = Field(
        default=None, description="Sample from the likeliest tokens whose probabilities add up to this."
    )
    top_k: Int32 | None = Field(
        default=None, description="Sample from this many of the likeliest tokens; 0 and -1 mean all."
    )
    seed: Int64 | None = Field(default=None, description="The same seed gives the same answer, whatever else runs.")
    stop: Text | Stops | None = Field(default=None, description="Up to four texts; the answer ends before them.")
    request_id: RequestId | None = Field(
        default=None, description="Part of the answer's id; X-Request-Id takes precedence."
    )
    stream: bool | None = Field(default=False, description="Send the answer piece by piece, as server-sent events.")
    user: Text | None = Field(default=None, description="Accepted, and not used.")
    priority: Int64 = Field(default=0, description="With --scheduling-policy priority: smaller goes first.")
    cache_salt: Salt | None = Field(default=None, description="Only requests with the same salt share cached prefixes.")

    def other_prompt(self) -> Any:
        """What a feature's field has in place of `prompt`. Raises InvalidRequestError if there is nothing."""
        raise InvalidRequestError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")

    def _sampling_params(self, defaults: dict[str, Any] | None, max_tokens: int | None) -> SamplingParams:
        """Raises InvalidRequestError for invalid values, and for values that exclude each other."""
        params = self._arguments(defaults, max_tokens)
        for name in params.keys() - set(SamplingParams.__struct_fields__):
            if params.pop(name):  # 0 asks for nothing
                raise InvalidRequestError(f"{name}: this engine was built without it.", name)
        return SamplingParams(**params)

    def _arguments(self, defaults: dict[str, Any] | None, max_tokens: int | None) -> dict[str, Any]:
        """The arguments of SamplingParams. `defaults` come from the model's generation_config.json; their max_tokens is
        an upper limit for every request."""
        params = dict(defaults or {})
        limit = params.pop("max_tokens", None)
        sent = {name: getattr(self, name) for name in _SAME_NAME}
        params |= {name: value for name, value in sent.items() if value is not None}
        params["max_tokens"] = max_tokens if limit is None else limit if max_tokens is None else min(max_tokens, limit)
        params["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        for feature in reversed(self.used_features()):
            feature.apply(self, params)
        return params


class CompletionRequest(*loaded("request", "CompletionRequest"), SamplingRequest):  # type: ignore[misc]
    """POST /v1/completions."""

    prompt: Text | TokenIds | Several[Text] | Several[TokenIds] | None = Field(
        default=None, description="A text, a list of token ids, or a list of either: each is a prompt of its own."
    )
    max_tokens: Int64 | None = Field(default=16, description="Maximum number of tokens of an answer; null is 16 too.")
    add_special_tokens: bool = Field(default=True, description="Add the tokens that the tokenizer puts around a text.")

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each as text or as token ids. Raises InvalidRequestError if there is none."""
        prompt: Any = self.prompt or self.other_prompt()
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            return list(prompt)
        return [prompt]

    def to_sampling_params(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        """Raises InvalidRequestError."""
        return self._sampling_params(defaults, 16 if self.max_tokens is None else self.max_tokens)


_KINDS_OF_FEATURES: dict[str, type[ContentKind]] = {kind: wanted("content", kind, kind) for kind in keys("content")}


class ContentPart(*dict.fromkeys(_KINDS_OF_FEATURES.values()), ContentKind):  # type: ignore[misc]
    """One part of a message's content. It has the fields of all kinds."""

    type: Text = Field(description="What kind it is of: text, or what a feature declares.")
    text: Text | None = Field(default=None, description="The text.")

    def as_text(self) -> str | None:
        """Of a part that is text."""
        return self.text


CONTENT_KINDS: dict[str, type[ContentKind]] = {**_KINDS_OF_FEATURES, "text": ContentPart}  # type of a part -> its kind


class MessageFunctionCall(BaseModel):
    """What an earlier answer called: `arguments` is JSON in a text."""

    name: Text = Field(description="Its name.")
    arguments: Text | None = Field(default=None, description="The arguments of the call, as JSON in a text.")


class MessageToolCall(BaseModel):
    """A tool call of an earlier answer."""

    id: Text | None = Field(default=None, description="Its id.")
    type: Literal["function"] = Field(default="function", description="What it is.")
    function: MessageFunctionCall = Field(description="The function.")


class ChatMessageParam(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Text = Field(description="Who speaks: system, developer, user, assistant or tool.")
    content: Text | ListOf[ContentPart | Text] | None = Field(default=None, description="A text, or a list of parts.")
    name: Text | None = Field(default=None, description="Name of the speaker, if several have this role.")
    tool_calls: ListOf[MessageToolCall] | None = Field(default=None, description="The calls that this answer made.")
    tool_call_id: Text | None = Field(default=None, description="The call whose result this message is.")
    reasoning: Text | None = Field(default=None, description="What the model thought before it answered.")
    reasoning_content: Text | None = Field(default=None, description="An older name of reasoning.")


class ChatTemplateFields(*loaded("request", "ChatTemplateFields"), RequestModel):  # type: ignore[misc]
    """What the chat template gets besides the messages."""


class ChatCompletionRequest(*loaded("request", "ChatCompletionRequest"), ChatTemplateFields, SamplingRequest):  # type: ignore[misc]
    """POST /v1/chat/completions."""

    refused: ClassVar[str] = "request+chat"
    messages: ListOf[ChatMessageParam] = Field(description="The oldest message first.")
    max_tokens: Int64 | None = Field(default=None, description="Maximum number of tokens of an answer.")
    max_completion_tokens: Int64 | None = Field(default=None, description="OpenAI's newer name of max_tokens.")
    add_special_tokens: bool | None = Field(  # None: templates write them, a chat without a template gets them
        default=None, description="Add the tokens that the tokenizer puts around a text."
    )

    def to_sampling_params(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        """Raises InvalidRequestError."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling_params(defaults, max_tokens)
