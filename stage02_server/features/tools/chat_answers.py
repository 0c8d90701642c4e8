"""How the answers to chats are parsed, as flags and request say, and their JSON."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.tools.answer_parser import AnswerDelta, AnswerParser
from stage02_server.features.tools.fields import FunctionCall, NamedToolChoice, ToolCall
from stage02_server.features.tools.reasoning_parsers import REASONING_PARSERS
from stage02_server.features.tools.tool_parsers import TOOL_PARSERS, NamedToolParser, RequiredToolParser
from stage02_server.protocol import ChatCompletionRequest
from stage02_server.serving_engine import EngineRequests
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


def _load_plugin(path: str, flag: str) -> None:
    """Run the user's file. Raises ConfigError, whatever its code raises."""
    name = f"stages_plugin_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag} {path}: this is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{flag} {path}: {type(error).__name__}: {error}") from error


def _known(name: str, parsers: dict[str, type], flag: str) -> None:
    if name not in parsers:
        raise ConfigError(f"{flag}: {name!r} is not known; there are {', '.join(sorted(parsers))}")


class ChatAnswers:
    """The parsers that the flags chose. Raises ConfigError for unknown names."""

    def __init__(self, args: FrontendArgs) -> None:
        if args.tool_parser_plugin:
            _load_plugin(args.tool_parser_plugin, "--tool-parser-plugin")
        if args.reasoning_parser_plugin:
            _load_plugin(args.reasoning_parser_plugin, "--reasoning-parser-plugin")
        if args.enable_auto_tool_choice and args.tool_call_parser is None:
            names = ", ".join(sorted(TOOL_PARSERS))
            raise ConfigError(f"--enable-auto-tool-choice needs --tool-call-parser, one of {names}")
        if args.tool_call_parser is not None:
            _known(args.tool_call_parser, TOOL_PARSERS, "--tool-call-parser")
        if args.reasoning_parser:
            _known(args.reasoning_parser, REASONING_PARSERS, "--reasoning-parser")
        self._args = args

    def check(self, request: ChatCompletionRequest) -> None:
        """Raises InvalidRequestError if the request lets the model choose a tool, and the flags do not."""
        if self._chooses(request) and not self._args.enable_auto_tool_choice:
            raise InvalidRequestError(
                'tool_choice "auto" needs a server with --enable-auto-tool-choice and --tool-call-parser.',
                "tool_choice",
            )

    def shown_to_template(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """The request as the chat template sees it."""
        if request.tool_choice == "none" and self._args.exclude_tools_when_tool_choice_none:
            return request.model_copy(update={"tools": None})
        return request

    def parser(self, request: ChatCompletionRequest, prompt: str, structured: bool) -> AnswerParser | None:
        """For one answer; None when its text is the content. With structured output there is no reasoning: the grammar
        begins with the first token."""
        tools: Any = None
        if isinstance(request.tool_choice, NamedToolChoice):
            tools = NamedToolParser(request.tool_choice.function.name)
        elif request.tool_choice == "required":
            tools = RequiredToolParser()
        elif (parser := self._auto(request)) is not None:
            tools = parser.for_tools(request.tools) if hasattr(parser, "for_tools") else parser()
        name = self._args.reasoning_parser
        reasoning = REASONING_PARSERS[name](prompt) if name and not structured else None
        if tools is None and reasoning is None:
            return None
        return AnswerParser(reasoning, tools, request.include_reasoning, request.parallel_tool_calls is not False)

    def keep_tags(self, request: ChatCompletionRequest, requests: EngineRequests) -> None:
        """If the tags that mark the model's calls may be special tokens, these must stay in the text."""
        if not getattr(self._auto(request), "SPECIAL_TAGS", False):
            return
        for one in requests.engine_requests:
            one.sampling_params = msgspec.structs.replace(one.sampling_params, skip_special_tokens=False)

    def for_request(
        self, request: ChatCompletionRequest, prompt: str, requests: EngineRequests
    ) -> Callable[[], ParsedAnswer] | None:
        """Makes each answer to the request; None if their text is their content."""
        structured = getattr(requests.engine_requests[0].sampling_params, "structured_outputs", None) is not None
        if self.parser(request, prompt, structured) is None:
            return None
        self.keep_tags(request, requests)
        named = isinstance(request.tool_choice, NamedToolChoice)

        def new_answer() -> ParsedAnswer:
            parser = self.parser(request, prompt, structured)
            assert parser is not None
            return ParsedAnswer(parser, requests.ids.engine_id(0), named)

        return new_answer

    def _auto(self, request: ChatCompletionRequest) -> Any:
        """The class of parsers for calls that the model chooses; None if it chooses none."""
        name = self._args.tool_call_parser
        return TOOL_PARSERS[name] if name is not None and self._chooses(request) else None

    def _chooses(self, request: ChatCompletionRequest) -> bool:
        return bool(request.tools) and request.tool_choice in (None, "auto")


class ParsedAnswer:
    """One answer as reasoning, content and tool calls. `named`: the request named the function to call."""

    def __init__(self, parser: AnswerParser, req: str, named: bool) -> None:
        self._parser, self._req, self._named = parser, req, named

    def delta(self, output: CompletionOutput) -> dict[str, Any]:
        """What a piece of output adds, as the `delta` of a chunk; empty if it is held back."""
        return delta_fields(self._feed(output))

    def message(self, output: CompletionOutput) -> dict[str, Any]:
        """A whole answer as fields of `ChatMessage`."""
        return message_fields(self._feed(output))

    def _feed(self, output: CompletionOutput) -> AnswerDelta:
        delta = self._parser.feed(output.text, output.finish_reason is not None)
        if trace.on and output.finish_reason is not None:
            trace.emit(
                "answer.parsed", req=self._req, index=output.index, reasoning_characters=self._parser.num_characters,
                tool_calls=self._parser.num_calls,
            )  # fmt: skip
        return delta

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """ "tool_calls" instead of "stop" if the model decided which tools to call; as with OpenAI, not if the request did."""
        called = self._parser.num_calls and not self._named
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def message_fields(delta: AnswerDelta) -> dict[str, Any]:
    """A whole answer as fields of `ChatMessage`. Content that is not there is null, if there is something else."""
    calls = [
        ToolCall(id=_call_id(), function=FunctionCall(name=call.name or "", arguments=call.arguments))
        for call in delta.calls.values()
    ]
    content = delta.content or (None if delta else "")
    return {"content": content, "reasoning": delta.reasoning or None, "tool_calls": calls or None}


def delta_fields(delta: AnswerDelta) -> dict[str, Any]:
    """A piece of an answer as the `delta` of a chunk."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = calls = []
        for index, call in delta.calls.items():
            begin = {} if call.name is None else {"id": _call_id(), "type": "function"}
            name = {} if call.name is None else {"name": call.name}
            calls.append({"index": index} | begin | {"function": name | {"arguments": call.arguments}})
    return fields
