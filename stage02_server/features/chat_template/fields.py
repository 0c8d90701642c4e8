"""The request fields that a Jinja chat template is told (vllm/entrypoints/openai/protocol.py)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from stage02_server.protocol_types import RequestFields, Text


class ChatTemplateKwargs(RequestFields):
    """Plain concatenation ignores them."""

    for_templates: ClassVar[bool] = True

    chat_template: Text | None = Field(
        default=None, description="A Jinja template for this request; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[Text, Any] | None = Field(default=None, description="Variables for the chat template.")
    documents: list[dict[Text, Any]] | None = Field(
        default=None, description="Texts that the chat template may show to the model."
    )
    reasoning_effort: Text | None = Field(
        default=None, description="How much the model shall think; the chat template sees it."
    )
