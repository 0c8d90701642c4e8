"""The field `prompt_embeds` of completions, and how much of it the server holds."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class PromptEmbedsLimit:
    """Part of FrontendArgs."""

    max_held_embeds_bytes: int = option(
        268435456,
        "most bytes of prompt_embeds that all unfinished requests may hold together (429 beyond)",
        at_least=1,
    )


FEATURE = Feature(
    name="prompt_embeds_requests",
    help="prompts that are embeddings, over HTTP",
    room=__package__,
    settings={"FrontendArgs": PromptEmbedsLimit},
    parts=(
        Part("request", ".fields:PromptEmbedsFields", key="CompletionRequest"),
        Part("server", ".serving:install", key="prompt_embeds"),
    ),
    needs=("prompt_embeds", "held_bytes"),
)
