"""What the Responses API calls text, for clients that send its parts to a chat (vllm/renderers/chat_utils/chat_message.py, MM_PARSER_MAP)."""

from __future__ import annotations

from pydantic import Field

from stage02_server.protocol_types import ContentKind, Text


class ResponsesText(ContentKind):
    """A part of type input_text or output_text."""

    text: Text | None = Field(default=None, description="The text.")

    def as_text(self) -> str | None:
        """As of a part of type text."""
        return self.text
