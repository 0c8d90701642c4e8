"""Answers that only make sense whole: vectors, classes, transcripts (vLLM: `_collect_batch` of the pooling handlers)."""

from __future__ import annotations

from contextlib import aclosing

from stage02_server.errors import unavailable
from stage02_server.features.several_prompts.several_prompts import merge_async_iterators
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import RequestOutput


async def collect(engine_client: AsyncLLM, requests: list[EngineCoreRequest]) -> list[RequestOutput]:
    """The last output of each request, in their order. Raises EngineDeadError, and APIError 503 if one was aborted from
    outside: half a vector is useless, and such an answer cannot say that it was cut off."""
    found: dict[int, RequestOutput] = {}
    flows = [engine_client.generate(each, each.sampling_params, each.request_id) for each in requests]
    async with aclosing(merge_async_iterators(flows)) as merged:
        async for index, output in merged:
            if output.outputs[0].finish_reason == "abort":
                raise unavailable("The request was aborted before it was finished.")
            found[index] = output
    return [found[index] for index in range(len(requests))]
