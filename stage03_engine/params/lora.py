"""The adapter of a request (vLLM: LoRARequest)."""

from __future__ import annotations

from typing import ClassVar


class LoRA:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "lora": {"input": "stage03_engine.frontend.features.adapters.input_hook:LoRAInputHook"}
    }
    lora: str | None = None  # the name of an adapter
    lora_int_id: int = 0  # its number, by which the engine knows it; set by the front end
