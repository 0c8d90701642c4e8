"""A prompt that is given as embeddings (vLLM: EmbedsPrompt)."""

from __future__ import annotations

from typing import ClassVar

_ROOM = "stage03_engine.core.features.prompt_embeds."


class PromptEmbeds:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "prompt_embeds": {
            "input": "stage03_engine.frontend.features.prompt_embeds.checks:PromptEmbedsInputHook",
            "scheduler": _ROOM + "scheduler_hook:PromptEmbedsSchedulerHook",
            "runner": _ROOM + "runner_hook:PromptEmbedsRunnerHook",
        }
    }
    prompt_embeds: bytes | None = None
    """A safetensors file with one tensor [num_tokens, hidden_size], perhaps in base64; the prompt is `num_tokens` times token 0 then."""
