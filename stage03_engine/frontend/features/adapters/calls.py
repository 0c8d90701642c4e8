"""Adapters for programs: vLLM's `add_lora`, `remove_lora`, `list_loras` and `pin_lora` of AsyncLLM, and `lora_request` of `generate`.

A `lora_request` is a LoRARequest, or anything with a `lora_name`, a `lora_int_id` (0: the next number) and a `lora_path`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.adapters.registry import Call, KnownAdapter, registry_of, run_blocking
from stage03_engine.params.lora import check_kinds
from stage03_engine.plugins import wanted

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.llm import LLM


async def add_lora(engine: AsyncLLM, lora_request: Any) -> bool:
    """Load an adapter into all engines, for requests that come from now on. False if it is there already. Raises InvalidRequestError."""
    await wanted("engine", "started", "what starts an engine")(engine)
    return await registry_of(engine.input_processor).changing(engine, lambda: _loading(engine, lora_request))


async def remove_lora(engine: AsyncLLM, lora_id: int) -> bool:
    """Unload the adapter with this number; False if there is none. Requests that run with it go on to their end."""
    check_kinds(lora_id=(lora_id, int))
    registry = registry_of(engine.input_processor)
    adapter = registry.find(lora_id)
    return adapter is not None and await registry.changing(engine, lambda: registry.unloading(adapter))


async def list_loras(engine: AsyncLLM) -> set[int]:
    """The numbers of the adapters in the engine."""
    await wanted("engine", "started", "what starts an engine")(engine)
    return set(await engine.call("list_loras") or ())


async def pin_lora(engine: AsyncLLM, lora_id: int) -> bool:
    """Keep the adapter with this number where it is used, whichever others come. False if the engine does not have it."""
    check_kinds(lora_id=(lora_id, int))
    await wanted("engine", "started", "what starts an engine")(engine)
    return bool(await engine.call("pin_lora", lora_id))


async def chosen(engine: AsyncLLM, lora_request: Any) -> dict[str, str]:
    """What a `lora_request` sets in SamplingParams. An adapter that is not there yet is loaded from its folder. Raises InvalidRequestError."""
    if _known(engine, lora_request) is None and lora_request.lora_path and _enabled(engine):
        await add_lora(engine, lora_request)
    return {"lora": lora_request.lora_name}


def chosen_now(llm: LLM, lora_request: Any) -> dict[str, str]:
    """The same without an event loop."""
    if _known(llm, lora_request) is None and lora_request.lora_path and _enabled(llm):
        run_blocking(llm.engine_core, _loading(llm, lora_request))
    return {"lora": lora_request.lora_name}


def _loading(engine: AsyncLLM | LLM, lora_request: Any) -> Generator[Call, Any, bool]:
    """True if it was not there: of two who want the same one, the second finds it."""
    if _known(engine, lora_request) is not None:
        return False
    if not _enabled(engine):
        raise InvalidRequestError("lora_name: this engine takes no adapters; start it with enable_lora.", "lora_name")
    name, folder, number = lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id
    yield from registry_of(engine.input_processor).loading(name, folder, number)
    return True


def _enabled(engine: AsyncLLM | LLM) -> bool:
    return bool(engine.vllm_config.lora_config.enable_lora)


def _known(engine: AsyncLLM | LLM, lora_request: Any) -> KnownAdapter | None:
    """The adapter that is meant, if it is there. Raises InvalidRequestError if another one has its name, and for what is no LoRARequest."""
    fields = {"lora_name": str, "lora_int_id": int, "lora_path": str}
    check_kinds(**{name: (getattr(lora_request, name, None), kind) for name, kind in fields.items()})
    adapter = registry_of(engine.input_processor).known.get(lora_request.lora_name)
    if adapter is None:
        return None
    path, number = lora_request.lora_path, lora_request.lora_int_id
    same = not path or os.path.realpath(path) == os.path.realpath(adapter.folder)
    if same and number in (0, adapter.number):
        return adapter
    raise InvalidRequestError(
        f"lora_name: {adapter.name} is adapter number {adapter.number}, from {adapter.folder}; give it no number and no folder, or these, or give "
        "the other one another name.",
        "lora_name",
    )
