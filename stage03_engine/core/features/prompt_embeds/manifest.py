"""`--enable-prompt-embeds`: prompts that are embeddings (vllm/config/model.py, enable_prompt_embeds)."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class PromptEmbedsSwitch:
    """Part of ModelConfig."""

    enable_prompt_embeds: bool = option(
        False, "take prompts that are embeddings: the field prompt_embeds of completions, safetensors in base64"
    )


FEATURE = Feature(
    name="prompt_embeds",
    help="prompts that are embeddings, in place of tokens",
    room=__package__,
    also=(
        "stage03_engine.params.prompt_embeds",
        "stage03_engine.params.embeds_file",
        "stage03_engine.frontend.features.prompt_embeds",
        "stage02_server.features.prompt_embeds",
    ),
    settings={"ModelConfig": PromptEmbedsSwitch},
    parts=(
        Part("params", "stage03_engine.params.prompt_embeds:PromptEmbeds"),
        Part("request", "stage02_server.features.prompt_embeds.fields:PromptEmbedsFields", key="CompletionRequest"),
    ),
    events=("embeds.given",),
)
