"""The shapes of /v1/responses (vllm/entrypoints/openai/responses/protocol.py): text in, text out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.protocol import ChatMessageParam, Int32, Int64, SamplingRequest, Text
from stage02_server.protocol_response import ChatLogProb
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.beam_search import BeamSearchParams
from stage03_engine.sampling_params import MAX_LOGPROBS, SamplingParams

LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs", "message.input_image.image_url", "reasoning.encrypted_content",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""What a client may ask to be told besides. All but the logprobs speak of things that no answer here holds."""

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "chat_template_kwargs": ({}, None),
    "context_management": ([], None),
    "conversation": (None,),
    "enable_response_messages": (False, None),
    "previous_input_messages": ([], None),
    "prompt": (None,),
    "reasoning": ({}, None),
    "tool_choice": ("none", "auto", None),
    "tools": ([], None),
    # Fields of the other two endpoints, which this one does not have.
    "best_of": (1, None),
    "echo": (False, None),
    "n": (1, None),
    "prompt_logprobs": (None,),
    "response_format": (None,),
    "return_token_ids": (False, None),
    "return_tokens_as_token_ids": (False, None),
    "use_beam_search": (False, None),
}
"""Field that is not built for this endpoint -> the values that change nothing and are accepted."""

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits: pairs, characters, characters

NAMES_HERE = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}
"""Field that the shared checks blame -> what the client of this endpoint calls it."""


def in_words_of_responses(error: InvalidRequestError) -> InvalidRequestError:
    """The same refusal, with the names that this endpoint's fields have."""
    name = NAMES_HERE.get(error.param or "")
    if name is None:
        return error
    text = str(error) if name == "input" else str(error).replace(error.param or "", name)
    return InvalidRequestError(text, name)


class InputPart(BaseModel):
    """One part of a message's content; only text can be served."""

    model_config = ConfigDict(extra="allow")

    type: Text
    text: Text | None = None


class InputItem(BaseModel):
    """One item of `input`. Only messages can be served, also those of an earlier answer's `output`."""

    model_config = ConfigDict(extra="allow")

    type: Text | None = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | list[InputPart] | None = None

    def message(self) -> ChatMessageParam:
        """The item as a message of a chat. Raises InvalidRequestError for what is not text."""
        if self.type not in (None, "message"):
            raise InvalidRequestError(f"Only messages can be served, not an item of type {self.type!r}.", "input")
        if self.role is None or self.content is None:
            raise InvalidRequestError("A message needs role and content.", "input")
        # The role of an instruction is called developer here; chat templates know it as system.
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return ChatMessageParam(role=role, content=self.content)
        for part in self.content:
            if part.type not in ("input_text", "output_text") or part.text is None:
                raise InvalidRequestError(
                    f"Only text can be served, not a content part of type {part.type!r}.", "input"
                )
        parts = [{"type": "text", "text": part.text} for part in self.content]
        return ChatMessageParam.model_validate({"role": role, "content": parts})


class TextFormat(BaseModel):
    """What the text must be: anything, JSON, or JSON of one schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses."""

    input: Text | list[InputItem]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: bool | None = True
    background: bool | None = False
    max_output_tokens: Int64 | None = None
    include: list[Include] | None = None
    top_logprobs: Int32 | None = 0
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    metadata: dict[Text, Text] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = "auto"

    def check_built(self) -> None:
        """Raises InvalidRequestError for a field in NOT_BUILT that asks for something."""
        super().check_built()
        for name, harmless in NOT_BUILT.items():
            value = getattr(self, name, None) if name in type(self).model_fields else (self.model_extra or {}).get(name)
            if isinstance(value, dict):  # clients like to send an object of nulls
                value = {key: item for key, item in value.items() if item is not None}
            if value not in harmless:
                raise InvalidRequestError(f"{name} is not supported by /v1/responses here; leave it out.", name)
        if self.text and self.text.verbosity not in (None, "medium"):
            raise InvalidRequestError("text.verbosity is not supported by this server; leave it out.", "text.verbosity")
        self._check_metadata()

    def _check_metadata(self) -> None:
        pairs = self.metadata or {}
        if len(pairs) > MAX_METADATA or any(
            len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in pairs.items()
        ):
            raise InvalidRequestError(
                f"metadata must hold at most {MAX_METADATA} pairs, with keys of at most {MAX_METADATA_KEY} and values of at "
                f"most {MAX_METADATA_VALUE} characters.",
                "metadata",
            )

    def messages(self) -> list[ChatMessageParam]:
        """`input` as messages. Raises InvalidRequestError for what is not text."""
        if isinstance(self.input, str):
            return [ChatMessageParam(role="user", content=self.input)]
        return [item.message() for item in self.input]

    def to_sampling_params(self) -> SamplingParams | BeamSearchParams:
        """Raises InvalidRequestError."""
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}.", "top_logprobs")
        wanted = LOGPROBS in (self.include or [])
        if top and not wanted:
            raise InvalidRequestError(f'top_logprobs needs include=["{LOGPROBS}"].', "top_logprobs")
        changed: dict[str, Any] = {"response_format": self._response_format()}
        if self.truncation == "auto":
            changed["truncate_prompt_tokens"] = -1
        return self.model_copy(update=changed)._sampling_params(self.max_output_tokens, top if wanted else None)

    def _response_format(self) -> dict[str, Any] | None:
        """`text.format` in the words of a chat."""
        format = self.text.format if self.text else None
        if format is None or format.type != "json_schema":
            return None if format is None else {"type": format.type}
        if format.json_schema is None:
            raise InvalidRequestError("text.format: type json_schema needs a schema.", "text.format")
        return {"type": "json_schema", "json_schema": {"name": format.name, "schema": format.json_schema}}


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogProb] = []


class OutputMessage(BaseModel):
    """The answer; the only item of `output`."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    content: list[OutputText] = []


class InputTokensDetails(BaseModel):
    """How many tokens of the input were found in the prefix cache. Writing into it is never counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """How many tokens of the output were reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens that a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: str


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponsesResponse(BaseModel):
    """The answer of /v1/responses: what was asked for, how far it has come, and the output when it is there."""

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
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    reasoning: None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None
