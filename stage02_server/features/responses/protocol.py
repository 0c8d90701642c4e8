"""The shape of requests to /v1/responses (vllm/entrypoints/openai/responses/protocol.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.protocol import ChatCompletionRequest, SamplingRequest
from stage02_server.protocol_chat import MAX_TOOLS, ChatMessageParam
from stage02_server.protocol_responses_input import InputItem
from stage02_server.protocol_responses_tools import ResponsesTool, ResponsesToolChoice, tools_of_chat
from stage02_server.protocol_types import Int32, Int64, RepeatedJson, Text
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.beam_search import BeamSearchParams
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
    "context_management": ([], None),
    "conversation": (None,),
    "enable_response_messages": (False, None),
    "previous_input_messages": ([], None),
    "prompt": (None,),
    # Fields of the other two endpoints, which this one does not have.
    "best_of": (1, None),
    "echo": (False, None),
    "n": (1, None),
    "prompt_logprobs": (None,),
    "response_format": (None,),
    "return_prompt_text": (False, None),
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
    text = str(error).replace("response_format", NAMES_HERE["response_format"])
    name = NAMES_HERE.get(error.param or "")
    if name is None:
        return InvalidRequestError(text, error.param)
    return InvalidRequestError(text if name == "input" else text.replace(error.param or "", name), name)


class TextFormat(BaseModel):
    """What the text must be: anything, JSON, or JSON of one schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    description: Text | None = None
    json_schema: RepeatedJson | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BaseModel):
    """The field `reasoning`: how much thinking the chat template is to ask for. Nobody writes summaries of it."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


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
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ResponsesToolChoice | None = "auto"
    parallel_tool_calls: bool | None = True
    max_tool_calls: Annotated[Int32, Field(ge=1)] | None = None  # OpenAI counts built-in tools here; there are none
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[Text, Any] | None = None
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
        if self.reasoning and {self.reasoning.summary, self.reasoning.generate_summary} - {None, "auto"}:
            raise InvalidRequestError(
                "reasoning.summary: this server writes no summaries; the reasoning itself is in the output.",
                "reasoning.summary",
            )
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

    def items(self) -> list[InputItem]:
        """`input` as items."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def as_chat(self, messages: list[ChatMessageParam]) -> ChatCompletionRequest:
        """What the chat template, the grammar of a forced call and the parsers of answers are to know, in the words of a
        chat. Raises InvalidRequestError for tools that are no functions."""
        tools, choice = tools_of_chat(self.tools or [], self.tool_choice)
        return ChatCompletionRequest(
            messages=messages,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

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
