"""Prompts as callers in Python write them (vllm/inputs: TextPrompt, TokensPrompt; vllm/lora/request.py: LoRARequest).

The server's requests come tokenized, since a refusal must be able to set the HTTP status. `AsyncLLM.generate(prompt, sampling_params,
request_id)`, as programs for vLLM call it, ends here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.plugins import find, wanted
from stage03_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.input_processor import InputProcessor

FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_starting: dict[AsyncLLM, asyncio.Task[Any]] = {}  # engines that somebody waits for


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name. One that is not there yet is loaded from `lora_path`, as number `lora_int_id` (0: the next one)."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def plain_prompt(prompt: Any) -> tuple[str | list[int], str | None]:
    """(what is tokenized, cache_salt). Raises InvalidRequestError for what is none of FORMS. A feature may know another key, such as
    `prompt_embeds`; its prompt has `params`, which says what goes into the request's, or `complete`, which is called with the request (`processed`)."""
    given = (
        prompt if isinstance(prompt, Mapping) else {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    )
    text, ids, salt = (given.get(name) for name in _KEYS)
    made = [form for key in given if isinstance(key, str) and (form := find("engine", f"prompt:{key}")) is not None]
    if made and isinstance(salt, str | None):
        return made[0](given), salt
    known = given.keys() <= set(_KEYS) and isinstance(salt, str | None)
    if known and isinstance(ids, list) and all(type(token_id) is int for token_id in ids):
        return ids, salt
    if known and ids is None and isinstance(text, str):
        return text, salt
    raise InvalidRequestError(f"prompt: a prompt is {FORMS}; either dictionary may hold a cache_salt.", "prompt")


def processed(
    processor: InputProcessor, request_id: str, prompt: str | list[int], params: SamplingParams, **settings: Any
) -> EngineCoreRequest:
    """What `plain_prompt` made as a request of the engine, with all that it brings besides tokens. Raises InvalidRequestError."""
    if (more := getattr(prompt, "params", None)) is not None:
        params = msgspec.structs.replace(params, **more(processor.vllm_config))
    request = processor.process_inputs(request_id, prompt, params, **settings)
    if (complete := getattr(prompt, "complete", None)) is not None:
        complete(request, processor.vllm_config)
    return request


async def request_of(
    engine: AsyncLLM,
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    *,
    priority: int = 0,
    lora_request: LoRARequest | None = None,
) -> tuple[EngineCoreRequest, str | None]:
    """(the request, its text), once the engine has started. Long texts are tokenized in a thread. Raises InvalidRequestError,
    EngineStartError."""
    plain, salt = plain_prompt(prompt)
    await started(engine)
    if lora_request is not None:
        choose = wanted("engine", "adapter_of_async", "an adapter")
        params = msgspec.structs.replace(params, **await choose(engine, lora_request))
    process = partial(processed, engine.input_processor)
    request = await asyncio.to_thread(process, request_id, plain, params, priority=priority, cache_salt=salt)
    return request, plain if isinstance(plain, str) else None


async def started(engine: AsyncLLM) -> None:
    """vLLM's constructor waits for the engine; here the first request does, so that the event loop stays free meanwhile."""
    if engine.ready is None:
        task = _starting.get(engine)
        if task is None or task.get_loop().is_closed():
            task = _starting[engine] = asyncio.create_task(engine.start())
            task.add_done_callback(lambda done: _starting.get(engine) is done and _starting.pop(engine))
        elif task.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("The engine is being started in another event loop, to which it belongs.")
        await asyncio.shield(task)
