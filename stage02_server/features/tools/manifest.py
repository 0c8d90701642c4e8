"""The flags of tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class ToolFlags:
    """How answers become tool calls, reasoning and content."""

    enable_auto_tool_choice: bool = option(
        False, "let the model decide whether to call a tool; needs --tool-call-parser"
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "do not show the tools to the chat template when the request has tool_choice none"
    )
    tool_call_parser: str | None = option(
        None,
        "how the model writes tool calls: hermes, llama3_json (or llama4_json), mistral, pythonic, qwen3_xml (or qwen3_coder, mimo), or the "
        "name of a plugin's parser",
    )
    tool_parser_plugin: str = option(
        "", "Python file that adds parsers to stage02_server.features.tools.tool_parsers.TOOL_PARSERS"
    )
    reasoning_parser: str = option(
        "",
        "how the model marks its reasoning: deepseek_r1 (<think> tags), qwen3 (or mimo; a tool call ends it too), or the name of a "
        "plugin's parser",
    )
    reasoning_parser_plugin: str = option(
        "", "Python file that adds parsers to stage02_server.features.tools.reasoning_parsers.REASONING_PARSERS"
    )


TOOL_FLAGS = (
    "enable_auto_tool_choice",
    "tool_call_parser",
    "tool_parser_plugin",
    "reasoning_parser",
    "reasoning_parser_plugin",
)

FEATURE = Feature(
    name="tools",
    help="tool calls and reasoning: the prompt's tools, and parsers of answers",
    room=__package__,
    settings={"FrontendArgs": ToolFlags},
    parts=(
        Part("request", ".fields:ToolList", key="ChatTemplateFields"),
        Part("request", ".fields:ToolFields", key="ChatCompletionRequest"),
        Part("content", ".fields:ThinkingPart", key="thinking"),
        Part("response", ".fields:MessageFields", key="ChatMessage"),
        Part("answers", ".install:install", flags=TOOL_FLAGS),
    ),
    events=("answer.parsed", "request.templated"),
)
