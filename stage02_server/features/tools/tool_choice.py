"""Which tools may be called, and which must be (vllm/entrypoints/openai/chat_completion/protocol.py, check_tool_usage; vllm/tool_parsers/utils.py).

A tool that must be called is structured output: the grammar allows nothing else. So every model can do it, even
one that has never seen a tool.
"""

from __future__ import annotations

from typing import Any

from stage02_server.features.tools.fields import NamedToolChoice, ToolChoice, ToolParam
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.structured_outputs import StructuredOutputsParams

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def force_tool(params: dict[str, Any], tools: list[ToolParam], choice: ToolChoice | None, parallel: bool) -> None:
    """With tool_choice "required" or a name: the answer must match the tools' schemas, whatever format the request asks for besides, and has
    no white space that only fills: a small model might write nothing else. `params` are the arguments of SamplingParams. Raises
    InvalidRequestError for a choice that the tools do not offer."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise InvalidRequestError("tool_choice needs tools.", "tool_choice")
    schema = _named(tools, choice.function.name) if isinstance(choice, NamedToolChoice) else _any_of(tools, parallel)
    params["structured_outputs"] = StructuredOutputsParams(json=schema, disable_any_whitespace=True, source="tools")


def _named(tools: list[ToolParam], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool.function.name == name:
            return tool.function.parameters or _NO_ARGUMENTS
    raise InvalidRequestError("tool_choice names a function that is not among the tools.", "tool_choice")


def _any_of(tools: list[ToolParam], parallel: bool) -> dict[str, Any]:
    """A list of calls. Definitions that a function's schema brings move to the top, where its $ref looks for them."""
    calls: list[dict[str, Any]] = []
    top: dict[str, dict[str, Any]] = {}
    for tool in tools:
        parameters = dict(tool.function.parameters or _NO_ARGUMENTS)
        for place in ("$defs", "definitions"):
            definitions = parameters.pop(place, {})
            if not isinstance(definitions, dict):
                raise InvalidRequestError(f"tools: {place} must be an object.", "tools")
            known = top.setdefault(place, {})
            if any(known.get(name, value) != value for name, value in definitions.items()):
                raise InvalidRequestError(f"tools: two functions define the same name in {place} differently.", "tools")
            known.update(definitions)
        name = {"type": "string", "enum": [tool.function.name]}
        calls.append(
            {
                "type": "object",
                "properties": {"name": name, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1} | most | {k: v for k, v in top.items() if v}
