"""Models that think aloud before they answer: which part is the reasoning (vllm/reasoning).

A parser of your own: `--reasoning-parser-plugin my_parser.py`, a file that puts its class into REASONING_PARSERS.
"""

from __future__ import annotations

from typing import ClassVar

from stage02_server.features.tools.answer_parser import AnswerDelta, first_of, split_held_back

BEGIN, END = "<think>", "</think>"


class DeepSeekR1Parser:
    """`<think>reasoning</think>content`. The prompt may have ended with <think> already; so all before </think> is reasoning,
    with the first tag or without. A prompt that ends with </think> has switched reasoning off."""

    ENDS: ClassVar[tuple[str, ...]] = (END,)

    def __init__(self, prompt: str) -> None:
        self._held = ""  # what may become the next tag
        self._blank: list[str] = []  # before the first tag
        self._begun, self._ended = False, prompt.rstrip().endswith(END)

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        """As `Parser.feed`."""
        if self._ended:
            return AnswerDelta(content=text)
        text, self._held = self._held + text, ""
        if not self._begun:
            stripped = text.lstrip()
            self._blank.append(text[: len(text) - len(stripped)])
            if BEGIN.startswith(stripped) and stripped != BEGIN and not finished:
                self._held = stripped
                return AnswerDelta()
            self._begun = True
            tagged = stripped.startswith(BEGIN)
            text = stripped.removeprefix(BEGIN) if tagged else "".join(self._blank) + stripped
        place, tag = first_of(text, self.ENDS)
        if tag:
            self._ended = True
            return AnswerDelta(text[:place], text[place:].removeprefix(END))
        reasoning, self._held = (text, "") if finished else split_held_back(text, *self.ENDS)
        return AnswerDelta(reasoning)


class Qwen3Parser(DeepSeekR1Parser):
    """As DeepSeek R1, but a model that calls a tool in the midst of its reasoning has ended it: <tool_call> is content."""

    ENDS = (END, "<tool_call>")


REASONING_PARSERS: dict[str, type] = {"deepseek_r1": DeepSeekR1Parser, "mimo": Qwen3Parser, "qwen3": Qwen3Parser}
"""`--reasoning-parser` -> a class whose objects are made with the prompt's text and are a `Parser`."""
