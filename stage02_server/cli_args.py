"""The settings of the HTTP server (vllm/entrypoints/openai/cli_args.py, FrontendArgs). Imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.config import option


@dataclass(frozen=True)
class FrontendArgs:
    """Flags of `serve` beside those of the engine."""

    host: str | None = option(None, "address to listen on; all interfaces if not given")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] | None = option(
        None, "names that requests may use for the model; its own if not given"
    )
    chat_template: str | None = option(None, "Jinja chat template, as a file or as text; replaces the model's own")
    chat_template_content_format: str = option(
        "auto",
        "how templates see a message's content: as one text, or as OpenAI's list of parts; auto looks at the template",
        ("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = option(False, "take a chat template that comes with a request")
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "variables for the chat template, where a request does not set them itself"
    )
    enable_auto_tool_choice: bool = option(
        False, "let the model decide whether to call a tool; needs --tool-call-parser"
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "do not show the tools to the chat template when the request has tool_choice none"
    )
    tool_call_parser: str | None = option(
        None, "how the model writes tool calls: hermes, or the name of a plugin's parser"
    )
    tool_parser_plugin: str = option("", "Python file that adds parsers to stage02_server.tool_parsers.TOOL_PARSERS")
    reasoning_parser: str = option(
        "", "how the model marks its reasoning: deepseek_r1 (<think> tags), or the name of a plugin's parser"
    )
    reasoning_parser_plugin: str = option(
        "", "Python file that adds parsers to stage02_server.reasoning_parsers.REASONING_PARSERS"
    )
    response_role: str = option("assistant", "role of the answering message in chats")
    engine: str = option(
        "core", "core = the real engine; echo = answers with the prompt itself, without torch", ("core", "echo")
    )
    in_process: bool = option(
        False, "run the engine inside the API process, for print and breakpoint(); slower, and without ZMQ"
    )
    shutdown_timeout: int = option(30, "seconds that running requests get to finish after SIGTERM")
    timeout_keep_alive: int = option(5, "seconds that an idle HTTP connection stays open")
    uvicorn_log_level: str = option(
        "info", "log level of the HTTP server", ("debug", "info", "warning", "error", "critical")
    )
    disable_uvicorn_access_log: bool = option(False, "no log line per HTTP request")
