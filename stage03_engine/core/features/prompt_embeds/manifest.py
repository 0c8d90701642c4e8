"""`--enable-prompt-embeds`: prompts that are embeddings (vllm/config/model.py, enable_prompt_embeds)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part, find

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_ROOM = "stage03_engine.core.features.prompt_embeds."
SCHEDULER_HOOK, RUNNER_HOOK = (
    _ROOM + "scheduler_hook:PromptEmbedsSchedulerHook",
    _ROOM + "runner_hook:PromptEmbedsRunnerHook",
)


@dataclass(frozen=True)
class PromptEmbedsSwitch:
    """Part of ModelConfig."""

    enable_prompt_embeds: bool = option(
        False, "take prompts that are embeddings: the field prompt_embeds of completions, safetensors in base64"
    )


@dataclass(frozen=True)
class PromptEmbedsFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """From the start, before those that look blocks up: a request's embeddings belong to their hashes."""
        if not config.model_config.enable_prompt_embeds:
            return {}
        return {"scheduler": [SCHEDULER_HOOK], "runner": [RUNNER_HOOK]}


def install(app: Any, services: Any) -> None:
    """The server counts what they hold, if there can be any."""
    if services.engine.vllm_config.model_config.enable_prompt_embeds and (own := find("server", "prompt_embeds")):
        own(app, services)


FEATURE = Feature(
    name="prompt_embeds",
    help="prompts that are embeddings, in place of tokens",
    room=__package__,
    also=(
        "stage03_engine.params.prompt_embeds",
        "stage03_engine.params.embeds_file",
        "stage03_engine.frontend.features.prompt_embeds",
    ),
    needs=("embedding_rows",),
    settings={"ModelConfig": PromptEmbedsSwitch, "VllmConfig": PromptEmbedsFlags},
    parts=(
        Part("params", "stage03_engine.params.prompt_embeds:PromptEmbeds"),
        Part("routes", ".manifest:install"),
        Part(
            "engine", "stage03_engine.frontend.features.prompt_embeds.forms:embeds_prompt", key="prompt:prompt_embeds"
        ),
    ),
    events=("embeds.given",),
)
