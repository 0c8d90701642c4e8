"""The shape of requests to /v1/responses (vllm/entrypoints/openai/responses/protocol.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.features.logprobs.fields import checked_top_logprobs
from stage02_server.features.tools.fields import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    ToolChoice,
    ToolParam,
)
from stage02_server.features.tools.json_values import RepeatedJson
from stage02_server.features.tools.tool_choice import force_tool
from stage02_server.protocol import (
    ChatCompletionRequest,
    ChatMessageParam,
    ContentPart,
    MessageFunctionCall,
    MessageToolCall,
    SamplingRequest,
)
from stage02_server.protocol_types import Int32, Int64, ListOf, Text
from stage03_engine.errors import InvalidRequestError
from stage03_engine.plugins import loaded
from stage03_engine.sampling_params import SamplingParams


class InputPart(BaseModel):
    """One part of an item's content: text, or for a model that sees an image."""

    type: Text = Field(description="What it is.")
    text: Text | None = Field(default=None, description="The text.")
    image_url: Text | None = Field(
        default=None,
        description="Of an input_image: a data: URL with base64, an address at one of --allowed-media-domains, or a file:/// URL below --allowed-local-media-path.",
    )
    detail: Text | None = Field(
        default=None, description="Accepted, and not used: the model's files say how large it sees an image."
    )

    def as_chat(self, types: tuple[str, ...]) -> ContentPart:
        """The part as a chat knows it. Raises InvalidRequestError if it is of none of these types, or incomplete."""
        if self.type == "input_image" and "input_text" in types:  # what users and tools say
            if self.image_url is None:
                raise InvalidRequestError("An input_image needs image_url; this server keeps no files.", "input")
            return ContentPart.model_validate({"type": "image_url", "image_url": self.image_url})
        if self.type not in types or self.text is None:
            raise InvalidRequestError(
                f"Only text can be served, not a content part of type {self.type[:50]!r}.", "input"
            )
        return ContentPart(type="text", text=self.text)


class InputItem(BaseModel):
    """One item of `input`, which may also be one of an earlier answer's `output`. What its type has no use for is None."""

    type: Text | None = Field(default="message", description="What it is.")
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        default=None, description="Who speaks: system, developer, user, assistant or tool."
    )
    content: Text | ListOf[InputPart] | None = Field(default=None, description="A text, or a list of parts.")
    # of a function call and of its output
    call_id: Text | None = Field(default=None, description="Which call; its result has the same.")
    name: Text | None = Field(default=None, description="Its name.")
    arguments: Text | None = Field(default=None, description="The arguments of the call, as JSON in a text.")
    output: Text | ListOf[InputPart] | None = Field(default=None, description="The result of a call.")
    summary: ListOf[InputPart] | None = Field(default=None, description="A summary of the reasoning.")
    encrypted_content: Text | None = Field(default=None, description="Nothing is encrypted here.")

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
    return [part.as_chat(types) for part in content]


def to_messages(items: list[InputItem]) -> list[ChatMessageParam]:
    """A conversation as a chat. Raises InvalidRequestError for what is not text, and for the result of a call that
    was not made."""
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
    """The stage that this is of an assistant turn: reasoning, content, calls."""
    return 2 if message.tool_calls else 0 if message.content is None else 1


def _goes_on(last: ChatMessageParam, message: ChatMessageParam) -> bool:
    """True if `message` continues the same turn. Several calls are one turn; anything else that comes twice is two."""
    same = last.role == message.role == "assistant"
    return same and (_place(message) > _place(last) or bool(message.tool_calls))


def _together(last: ChatMessageParam, message: ChatMessageParam) -> ChatMessageParam:
    if last.tool_calls and message.tool_calls:
        last.tool_calls += message.tool_calls  # in place: there may be thousands
        return last
    return ChatMessageParam(
        role="assistant",
        reasoning=last.reasoning,
        content=message.content if last.content is None else last.content,
        tool_calls=[*(last.tool_calls or []), *(message.tool_calls or [])] or None,
    )


class ResponsesTool(BaseModel):
    """One tool."""

    type: Text = Field(description="What it is.")
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(default=None, description="Its name.")
    description: Text | None = Field(
        default=None, description="What it is for; the chat template may show it to the model."
    )
    parameters: RepeatedJson | None = Field(default=None, description="A JSON schema of the function's arguments.")
    strict: bool | None = Field(
        default=None, description="Accepted; a grammar is used where tool_choice or the format asks for one."
    )

    def as_chat(self) -> ToolParam:
        """Raises InvalidRequestError for a tool that is not a function."""
        if self.type != "function":
            raise InvalidRequestError(
                f"tools: only functions can be called here; there is no {self.type[:50]!r} on this server.", "tools"
            )
        if self.name is None:
            raise InvalidRequestError("tools: a function needs a name, beside its type.", "tools")
        function = FunctionDefinition.model_validate(self.model_dump(exclude_unset=True, exclude={"type"}))
        return ToolParam(function=function)


class ToolName(BaseModel):
    """A tool, by its name."""

    type: Text = Field(description="What it is.")
    name: Text | None = Field(default=None, description="Its name.")


class ChosenTool(ToolName):
    """{"type": "function", "name": ...}, or {"type": "allowed_tools", "mode": ..., "tools": [...]}: only some of the tools."""

    mode: Literal["auto", "required"] | None = Field(default=None, description="auto or required.")
    tools: ListOf[ToolName] | None = Field(default=None, description="The tools that may be called.")


ResponsesToolChoice = Literal["none", "auto", "required"] | ChosenTool


def tools_of_chat(
    tools: list[ResponsesTool], choice: ResponsesToolChoice | None
) -> tuple[list[ToolParam], ToolChoice | None]:
    """(the tools that may be called, which of them must be). Raises InvalidRequestError."""
    known = [tool.as_chat() for tool in tools]
    if not isinstance(choice, ChosenTool):
        return known, choice
    if choice.type == "function" and choice.name is not None:
        return known, NamedToolChoice(function=FunctionName(name=choice.name))
    if choice.type != "allowed_tools" or choice.mode is None or not choice.tools:
        raise InvalidRequestError(
            "tool_choice must be none, auto, required, a function with its name, or allowed_tools with mode and tools.",
            "tool_choice",
        )
    allowed = {tool.name for tool in choice.tools if tool.type == "function"}
    if len(allowed) < len(choice.tools) or not allowed <= {tool.function.name for tool in known}:
        raise InvalidRequestError("tool_choice allows a function that is not among the tools.", "tool_choice")
    return [tool for tool in known if tool.function.name in allowed], choice.mode


LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs", "message.input_image.image_url", "reasoning.encrypted_content",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""What a client may ask for besides. All but the logprobs concern things that no answer here holds."""

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
        return type(error)(text, error.param)
    return type(error)(text if name == "input" else text.replace(error.param or "", name), name)


class TextFormat(BaseModel):
    """What the text must be: anything, JSON, or JSON of one schema."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = Field(default="text", description="What it is.")
    name: Text | None = Field(default=None, description="Its name.")
    description: Text | None = Field(
        default=None, description="What it is for; the chat template may show it to the model."
    )
    json_schema: RepeatedJson | None = Field(default=None, alias="schema", description="The JSON schema.")
    strict: bool | None = Field(
        default=None, description="Accepted; a grammar is used where tool_choice or the format asks for one."
    )


class TextConfig(BaseModel):
    """The field `text`."""

    format: TextFormat | None = Field(default=None, description="Text, a JSON object, or JSON that follows a schema.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="Accepted at its neutral value."
    )


class ReasoningConfig(BaseModel):
    """The field `reasoning`: how much thinking the chat template is to ask for. No summary of the reasoning is written."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="How much the model should think; the chat template sees it."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Summaries are not written."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="An older name of summary."
    )


class ResponsesRequest(*loaded("request", "ResponsesRequest"), SamplingRequest):  # type: ignore[misc]
    """POST /v1/responses."""

    input: Text | ListOf[InputItem] = Field(description="A text, or the items of a conversation.")
    instructions: Text | None = Field(default=None, description="A system message for this response only.")
    previous_response_id: Text | None = Field(
        default=None, description="The stored response whose conversation goes on."
    )
    store: bool | None = Field(default=True, description="Keep the response for later requests.")
    background: bool | None = Field(
        default=False, description="Answer at once and go on working; GET reports when it is done."
    )
    max_output_tokens: Int64 | None = Field(
        default=None, description="Most tokens of the answer, its reasoning included."
    )
    include: ListOf[Include] | None = Field(default=None, description="What the answer shall hold besides.")
    top_logprobs: Int32 | None = Field(
        default=0, description="With logprobs: also those of this many of the likeliest tokens."
    )
    text: TextConfig | None = Field(default=None, description="What form the text of the answer has.")
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="Functions that the model may call."
    )
    tool_choice: ResponsesToolChoice | None = Field(
        default="auto", description="none, auto, required, or one function by its name."
    )
    parallel_tool_calls: bool | None = Field(default=True, description="Whether an answer may have more than one call.")
    max_tool_calls: Annotated[Int32, Field(ge=1)] | None = Field(
        default=None, description="Most calls of tools that the server runs; it runs none."
    )  # OpenAI counts built-in tools here; there are none
    reasoning: ReasoningConfig | None = Field(default=None, description="How much the model shall think.")
    include_reasoning: bool = Field(default=True, description="Return the reasoning that --reasoning-parser finds.")
    chat_template_kwargs: dict[Text, Any] | None = Field(default=None, description="Variables for the chat template.")
    truncation: Literal["auto", "disabled"] | None = Field(
        default="disabled", description='With "auto", a prompt that is too long loses its beginning.'
    )
    metadata: dict[Text, Text] | None = Field(
        default=None, description="Up to 16 texts by name, which the answer repeats."
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        default="auto", description="Accepted; there is one kind of service."
    )

    def check_built(self) -> None:
        """Raises InvalidRequestError for a field in NOT_BUILT that asks for something."""
        super().check_built()
        for name, harmless in NOT_BUILT.items():
            value = getattr(self, name, None) if name in type(self).model_fields else (self.model_extra or {}).get(name)
            if isinstance(value, dict):  # clients often send an object of nulls
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
        """The request as a chat, for the chat template, the grammar of a forced call and the parsers of answers. Raises
        InvalidRequestError for tools that are not functions."""
        tools, choice = tools_of_chat(self.tools or [], self.tool_choice)
        fields: dict[str, Any] = {
            "tools": tools or None,
            "tool_choice": None if choice == "auto" else choice,
            "parallel_tool_calls": self.parallel_tool_calls if tools else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatCompletionRequest(
            messages=messages, **{name: value for name, value in fields.items() if value is not None}
        )

    def to_sampling_params(self, defaults: dict[str, Any], chat: ChatCompletionRequest) -> SamplingParams:
        """`chat` is the request as a chat. Raises InvalidRequestError."""
        top = checked_top_logprobs(self.top_logprobs)
        wanted = LOGPROBS in (self.include or [])
        if top and not wanted:
            raise InvalidRequestError(f'top_logprobs needs include=["{LOGPROBS}"].', "top_logprobs")
        changed: dict[str, Any] = {"response_format": self._response_format()}
        if self.truncation == "auto":
            changed["truncate_prompt_tokens"] = -1
        copy = self.model_copy(update=changed)
        params = copy._arguments(defaults, self.max_output_tokens)
        params["logprobs"] = top if wanted else None
        force_tool(params, chat.tools or [], chat.tool_choice, chat.parallel_tool_calls is not False)
        return SamplingParams(**params)

    def _response_format(self) -> dict[str, Any] | None:
        """`text.format` as a chat has it."""
        format = self.text.format if self.text else None
        if format is None or format.type != "json_schema":
            return None if format is None else {"type": format.type}
        if format.json_schema is None:
            raise InvalidRequestError("text.format: type json_schema needs a schema.", "text.format")
        return {"type": "json_schema", "json_schema": {"name": format.name, "schema": format.json_schema}}
