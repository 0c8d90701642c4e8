"""The request fields of tool calling: which tools there are, and which must be called (vllm/entrypoints/openai/chat_completion/protocol.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.protocol_types import AnswerHook, ContentKind, RequestFields, Text

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing

MAX_TOOLS = 128


class FunctionDefinition(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=128, description="Its name.")
    description: Text | None = Field(
        default=None, description="What it is for; the chat template may show it to the model."
    )
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema of the function's arguments.")


class ToolParam(BaseModel):
    """A tool; only functions exist."""

    type: Literal["function"] = Field(default="function", description="What it is.")
    function: FunctionDefinition = Field(description="The function.")


class FunctionName(BaseModel):
    """The name of a function."""

    name: Text = Field(description="Its name.")


class NamedToolChoice(BaseModel):
    """The tool that must be called."""

    type: Literal["function"] = Field(default="function", description="What it is.")
    function: FunctionName = Field(description="The function.")


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ThinkingPart(ContentKind):
    """What the model thought before it answered, as a part of what it said."""

    thinking: Text | None = Field(default=None, description="The text of a part that is reasoning.")

    def as_text(self) -> str | None:
        """The thought itself."""
        return self.thinking


class ToolList(RequestFields):
    """The tools, which the chat template shows to the model."""

    parser_class: ClassVar[str] = "stage02_server.features.tools.chat_answers:ChatAnswers"

    tools: list[ToolParam] | None = Field(
        default=None, max_length=MAX_TOOLS, description="Functions that the model may call."
    )


class ToolFields(RequestFields):
    """Which of the tools the model must call, and what the answer shows."""

    parser_class: ClassVar[str] = "stage02_server.features.tools.chat_answers:ChatAnswers"

    tool_choice: ToolChoice | None = Field(  # None: "auto" if there are tools
        default=None, description="none, auto, required, or one function by its name."
    )
    parallel_tool_calls: bool | None = Field(default=True, description="Whether an answer may have more than one call.")
    include_reasoning: bool = Field(default=True, description="Return the reasoning that --reasoning-parser finds.")

    @property
    def forces_call(self) -> bool:
        """True if the answer is a call whatever the model thinks."""
        return self.tool_choice not in (None, "none", "auto")

    def apply(self, params: dict[str, Any]) -> None:
        """A forced call is structured output. Raises InvalidRequestError for a choice that the tools do not offer."""
        if self.forces_call:
            from stage02_server.features.tools.tool_choice import force_tool

            tools = getattr(self, "tools", None) or []
            force_tool(params, tools, self.tool_choice, self.parallel_tool_calls is not False)

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """The engine compiles the grammar of the tools' schemas, and may refuse it."""
        if not self.forces_call:
            return None
        from stage02_server.features.structured_outputs.refusal_first import RefusalFirst

        return RefusalFirst()


class FunctionCall(BaseModel):
    """The function that the model calls; `arguments` is JSON as the model wrote it, valid or not."""

    name: str = Field(description="Its name.")
    arguments: str = Field(description="The arguments of the call, as JSON in a text.")


class ToolCall(BaseModel):
    """A tool call of the answer."""

    id: str = Field(description="Its id, which the message with its result names.")
    type: Literal["function"] = Field(default="function", description="What it is.")
    function: FunctionCall = Field(description="The function.")


class MessageFields(BaseModel):
    """What the answering message may hold beside its content."""

    reasoning: str | None = Field(default=None, description="What the model thought before it answered.")
    tool_calls: list[ToolCall] | None = Field(default=None, description="The calls that this answer made.")
