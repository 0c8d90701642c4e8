"""The request fields of tool calling: which tools there are, and which must be called (vllm/entrypoints/openai/protocol.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.protocol_types import Text

MAX_TOOLS = 128


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
