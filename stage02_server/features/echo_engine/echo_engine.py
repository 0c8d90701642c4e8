"""An engine core that needs no model: it answers with the prompt, again and again (`--engine echo`).

It has the client interface of the real one, so the whole server and the whole front end run unchanged, without torch
and without a second process. It replaces AsyncMPClient of vllm/v1/engine/core_client.py.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from dataclasses import dataclass
from typing import Any

from stage03_engine.args.check import check_one_engine
from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
)
from stage03_engine.params.pooling_params import TOKEN_TASKS, PoolingParams
from stagetrace import trace

AT_ONCE = 16  # requests of a step, after which everybody else has a turn: this engine is in the process of the server
TICK_SECONDS = 0.002  # a decode step of a small model on a GPU takes about this long


@dataclass
class _Running:
    request: EngineCoreRequest
    num_output_tokens: int = 0


class EchoCoreClient(AsyncEngineCoreClient):
    """Every tick gives every request its next token: the prompt's first, second, ... and from the start again."""

    def __init__(self, config: VllmConfig, tick_seconds: float = TICK_SECONDS) -> None:
        check_one_engine(config, "--engine echo")
        self._config = config
        self._tick_seconds = tick_seconds
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._has_aborted = False  # what the next outputs tell, even if nobody runs any more
        if trace.on:
            trace.emit("client.created", kind="EchoCoreClient", engine_ranks=[])

    async def start(self) -> EngineReady:
        return EngineReady(num_gpu_blocks=0, max_model_len=self._config.max_model_len)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._running[request.request_id] = _Running(request)
        self._work.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._has_aborted = True
        self._work.set()

    async def call(self, method: str, *args: Any) -> bool:
        if method.endswith("_profile"):
            raise InvalidRequestError("This engine computes nothing that could be profiled.")
        return method == "reset_prefix_cache" and not self._running

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._running and not self._has_aborted:
            self._work.clear()
            await self._work.wait()
        self._has_aborted = False
        await asyncio.sleep(self._tick_seconds)
        outputs = []
        for number, running in enumerate(list(self._running.values()), start=1):
            outputs.append(self._next(running))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        for output in outputs:
            if output.finish_reason is not None:
                self._running.pop(output.request_id, None)  # it may be aborted by now
        return EngineCoreOutputs(outputs, SchedulerStats(num_running=len(self._running)), engine_index=0)

    def _next(self, running: _Running) -> EngineCoreOutput:
        request, params = running.request, running.request.sampling_params
        if isinstance(request.task, PoolingParams):
            return self._pooled(request, request.task)
        token = request.prompt_token_ids[running.num_output_tokens % len(request.prompt_token_ids)]
        running.num_output_tokens += 1
        output = EngineCoreOutput(request.request_id, [token])
        if running.num_output_tokens == 1:
            output.queued_seconds = 0.0
            if params.prompt_logprobs is not None:
                rest = request.prompt_token_ids[1:]
                entries = [self._logprobs(i, self._likely(i, params.prompt_logprobs)) for i in rest]
                output.result = {"prompt_logprobs": entries}
        if params.num_logprobs is not None:
            named = params.logprob_token_ids
            output.new_logprobs = [
                self._logprobs(token, self._likely(token, params.num_logprobs) if named is None else named)
            ]
        if token in params.stop_token_ids:
            output.finish_reason, output.stop_reason = FinishReason.STOP, token
        elif token == request.eos_token_id and not params.ignore_eos:
            output.finish_reason = FinishReason.STOP
        elif running.num_output_tokens == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output

    def _pooled(self, request: EngineCoreRequest, params: PoolingParams) -> EngineCoreOutput:
        """The echo's vectors count tokens: number d says how many of them have an id that is d modulo the hidden size, or the
        number of classes. Scaled to length 1 they pass for probabilities too."""
        tokens, labels = request.prompt_token_ids, self._config.shape.labels
        size = len(labels) if "classify" in params.task else self._config.shape.hidden_size
        kept = params.dimensions or self._config.pooling_config.dimensions or size
        texts = [[token] for token in tokens] if params.task in TOKEN_TASKS else [tokens]
        vectors = [[float(sum(token % size == d for token in text)) for d in range(kept)] for text in texts]
        if params.normalize is not False:
            lengths = [math.hypot(*vector) or 1.0 for vector in vectors]
            vectors = [[x / length for x in vector] for vector, length in zip(vectors, lengths)]
        pooled = [array("f", vector).tobytes() for vector in vectors]
        return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.STOP, result={"pooled": pooled})

    def _likely(self, token: int, k: int) -> list[int]:
        """The echo's own token, and the k - 1 ids that follow it."""
        return [token, *((token + i) % self._config.shape.vocab_size for i in range(1, k))][:k]

    def _logprobs(self, token: int, others: list[int]) -> TokenLogprobs:
        """The echo is certain: probability 1 for its token, 0 for any other."""
        return TokenLogprobs(
            [token, *others], [0.0] + [0.0 if i == token else -math.inf for i in others], sampled_rank=1
        )

    def shutdown(self) -> None:
        self._running.clear()
