"""Models that think aloud before they answer: which part is the reasoning (vllm/reasoning).

A parser of your own: `--reasoning-parser-plugin my_parser.py`, a file that puts its class into REASONING_PARSERS.
"""

from __future__ import annotations

from stage02_server.features.tools.answer_parser import AnswerDelta, split_held_back

BEGIN, END = "<think>", "</think>"


class DeepSeekR1Parser:
    """`<think>reasoning</think>content`. The prompt may have ended with <think> already; so all before </think> is reasoning,
    with the first tag or without. A prompt that ends with </think> has switched reasoning off."""

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
        reasoning, tag, content = text.partition(END)
        if tag:
            self._ended = True
            return AnswerDelta(reasoning, content)
        if not finished:
            reasoning, self._held = split_held_back(reasoning, END)
        return AnswerDelta(reasoning)


REASONING_PARSERS: dict[str, type] = {"deepseek_r1": DeepSeekR1Parser}
"""`--reasoning-parser` -> a class whose objects are made with the prompt's text and are a `Parser`."""
