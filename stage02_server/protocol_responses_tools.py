"""Tools as /v1/responses spells them, and the same in the words of a chat. Only functions exist: a tool that OpenAI's servers
run themselves (web_search, file_search, mcp, ...) has nobody to run it here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from stage02_server.protocol_chat import FunctionDefinition, FunctionName, NamedToolChoice, ToolChoice, ToolParam
from stage02_server.protocol_types import RepeatedJson, Text
from stage03_engine.errors import InvalidRequestError


class ResponsesTool(BaseModel):
    """One tool."""

    type: Text
    name: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    description: Text | None = None
    parameters: RepeatedJson | None = None
    strict: bool | None = None

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

    type: Text
    name: Text | None = None


class ChosenTool(ToolName):
    """{"type": "function", "name": ...}, or {"type": "allowed_tools", "mode": ..., "tools": [...]}: only some of the tools."""

    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


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
