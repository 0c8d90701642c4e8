"""Tool calls in the text of an answer (vllm/tool_parsers).

A parser of your own: `--tool-parser-plugin my_parser.py`, a file that puts its class into TOOL_PARSERS.
"""

from __future__ import annotations

from stage02_server.features.tools.answer_parser import AnswerDelta
from stage02_server.features.tools.calls_in_text import CallsInText, JsonCall, JsonCalls, Reader
from stage02_server.features.tools.mistral import MistralToolParser
from stage02_server.features.tools.pythonic import PythonicToolParser
from stage02_server.features.tools.qwen3_xml import Qwen3XmlToolParser


class HermesToolParser(CallsInText):
    """`text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text`, as Hermes and Qwen write calls.

    What is between the tags but is not a call stays content, tags and all.
    """

    BEGINS = ("<tool_call>",)
    END = "</tool_call>"
    SPECIAL_TAGS = True

    def reader(self, begin: str) -> tuple[Reader, str]:
        """As `CallsInText.reader`."""
        return JsonCall(begin, self.tell), ""


class Llama3JsonToolParser(CallsInText):
    """`<|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}`, as Llama 3 and 4 write calls.

    Models leave the tag out, and it is a special token that may not be in the text. So any object may be a call; one without a name or
    without arguments stays content.
    """

    BEGINS = ("<|python_tag|>", "{")
    END = ";"

    def reader(self, begin: str) -> tuple[Reader, str]:
        """As `CallsInText.reader`."""
        tag, own = ("", begin) if begin == "{" else (begin, "")
        return JsonCall(tag, self.tell, lenient=False), own


class RequiredToolParser(CallsInText):
    """`[{"name": "f", "parameters": {...}}, ...]`, which the grammar of tool_choice "required" allows; any other text, as of the
    echo engine, to which no grammar applies, is content."""

    BEGINS = ()

    def __init__(self) -> None:
        super().__init__()
        self._reader = self.reader("")[0]

    def reader(self, begin: str) -> tuple[Reader, str]:
        """As `CallsInText.reader`."""
        return JsonCalls(begin, self.tell), ""


class NamedToolParser:
    """The answer is the arguments of the one function that the request chose."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`."""
        delta = AnswerDelta()
        if text:
            delta.add_call(0, self._name, text)
            self._name = None
        return delta


TOOL_PARSERS: dict[str, type] = {
    "hermes": HermesToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_json": Llama3JsonToolParser,
    "mimo": Qwen3XmlToolParser,
    "mistral": MistralToolParser,
    "pythonic": PythonicToolParser,
    "qwen3_coder": Qwen3XmlToolParser,
    "qwen3_xml": Qwen3XmlToolParser,
}
"""`--tool-call-parser` -> a class whose objects are made without arguments and are a `Parser`. If it has a class method `for_tools`, this
makes them, from the request's tools."""
