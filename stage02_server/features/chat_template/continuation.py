"""Chats whose answer continues the last message: it has that message's role, and repeats its text if `echo` asks for it."""

from __future__ import annotations

from typing import Any

from stage02_server.chat_template import text_of
from stage02_server.protocol import ChatMessageParam
from stage02_server.protocol_types import AnswerHook
from stage03_engine.outputs import CompletionOutput


class ContinuationHook(AnswerHook):
    """Answers have this role, and begin with the text of the message."""

    def __init__(self, role: str, echoed: ChatMessageParam | None) -> None:
        self._role, self._echoed = role, text_of(echoed) if echoed else ""

    def chunk(self, index: int, chunk: Any) -> None:
        """The first chunk of a stream says who speaks."""
        delta = chunk.choices[0].delta
        if "role" in delta:
            delta |= {"role": self._role, "content": self._echoed}

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """A whole answer."""
        message = getattr(choice, "message", None)
        if message is not None:
            message.role = self._role
            if self._echoed:
                message.content = self._echoed + (message.content or "")
