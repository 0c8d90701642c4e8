"""The flags of Jinja chat templates, beside `--chat-template`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.config import option


@dataclass(frozen=True)
class ChatTemplateFlags:
    """What templates see, and whose templates are rendered."""

    chat_template_content_format: str = option(
        "auto",
        "how templates see a message's content: as one text, or as OpenAI's list of parts; auto looks at the template",
        ("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = option(False, "take a chat template that comes with a request")
    max_request_templates: int = option(
        8, "most requests with a chat template of their own that wait or are rendered at once (429 beyond)", at_least=1
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "variables for the chat template, where a request does not set them itself"
    )
