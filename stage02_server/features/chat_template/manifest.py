"""The flags of Jinja chat templates, beside `--chat-template`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


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


FEATURE = Feature(
    name="chat_template",
    help="Jinja chat templates, of the model, of `--chat-template`, or of a request",
    room=__package__,
    settings={"FrontendArgs": ChatTemplateFlags},
    parts=(
        Part("server", ".jinja:JinjaChatTemplate", key="chat_template"),
        Part("server", ".jinja:load_chat_template", key="load_chat_template"),
        Part("llm", ".offline:chat", key="chat"),
        Part("request", ".fields:ChatTemplateKwargs", key="ChatTemplateFields"),
        Part("request", ".fields:Continuation", key="ChatTemplateFields"),
    ),
    needs=("child_process",),
    events=("template.spawned",),
)
