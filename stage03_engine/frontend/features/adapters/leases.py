"""Who sends one request after another with an adapter keeps it until the last one has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.frontend.features.adapters.registry import registry_of
from stage03_engine.messages import EngineCoreRequest

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM


class AdapterLease:
    """A context: the adapter of `request` stays in the engines while it lasts, also if it is unloaded meanwhile. Otherwise a beam search would
    end between two of its tokens."""

    def __init__(self, engine: AsyncLLM, request: EngineCoreRequest) -> None:
        self._engine, self._number = engine, request.sampling_params.lora_int_id
        self._registry = registry_of(engine.input_processor)

    def __enter__(self) -> None:
        self._registry.lease(self._number)

    def __exit__(self, *error: object) -> None:
        self._registry.release(self._engine.engine_core, self._number)
