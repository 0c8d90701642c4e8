"""One engine of several: the client of its process, what it is doing, and its part of the machine."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.core_client import AsyncEngineCoreClient, AsyncMPClient
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.devices import own_devices
from stage03_engine.messages import EngineCoreOutputs
from stage03_engine.mixins import each
from stagetrace import trace

MakeEngine = Callable[[VllmConfig, int], AsyncEngineCoreClient]
"""(settings, number) -> the client of the engine with this number."""


class DPAsyncMPClient(AsyncMPClient):
    """The client of an engine with a number: the only one of a server with --data-parallel-rank, or one of several below DPLBAsyncMPClient
    (vllm/v1/engine/core_client.py)."""

    def __init__(self, config: VllmConfig, engine_index: int | None = None) -> None:
        self._is_alone = engine_index is None  # then the GPUs have been divided among the servers already
        [first, *_] = config.data_parallel_config.engine_indices
        self.engine_index = first if engine_index is None else engine_index
        super().__init__(numbered(config, self.engine_index))

    def start_process(self) -> None:
        if self._is_alone:
            if trace.on:
                trace.emit("client.created", kind="DPAsyncMPClient", engine_ranks=[self.engine_index])
            self._process = EngineProcess(self._config, self.engine_index)
            return
        with own_devices(self._config, self.engine_index - self._config.data_parallel_config.first_index):
            self._process = EngineProcess(self._config, self.engine_index)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        outputs.engine_index = self.engine_index
        return outputs

    def end_process(self) -> None:
        """End and reap the process, from any thread; `shutdown` then has only the sockets to close."""
        if self._process is not None:
            self._process.shutdown()

    def stands_still(self) -> None:
        """It has owed an answer for too long. Nothing to do here: its process is ended like that of a dead engine."""


class EngineState(enum.StrEnum):
    """What an engine is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # it finishes its requests, then ends
    DEAD = "dead"


@dataclass
class Engine:
    """An engine as DPLBAsyncMPClient sees it."""

    index: int
    client: AsyncEngineCoreClient
    state: EngineState = EngineState.LOADING
    num_requests: int = 0  # of this front end, in this engine
    num_gpu_blocks: int | None = None  # of its KV cache, once it has said so
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.Task[None] | None = None
    owes_since: float | None = None  # by `DPLBAsyncMPClient.clock`; each sign of life counts as an answer

    @property
    def is_alive(self) -> bool:
        """Does it answer?"""
        return self.state in (EngineState.READY, EngineState.DRAINING)


def numbered(config: VllmConfig, engine_index: int) -> VllmConfig:
    """The settings of one engine of several, which its workers are named after: Worker_DP1_TP0."""
    if config.data_parallel_config.data_parallel_size == 1:
        return config
    observed: Any = config.observability_config  # with the fields that features add
    return replace(config, observability_config=replace(observed, engine_index=engine_index))


def share_of(config: VllmConfig, size: int, later: bool = False) -> VllmConfig:
    """The settings of one of `size` engines. On a CPU it gets its part of this machine's cores and memory. `later`: it joins engines that serve
    already, and features bring it to where these are (`DPLBAsyncMPClient.preparing`)."""
    device, cache, parallel = config.device_config, config.cache_config, config.data_parallel_config
    here = max(1, size - parallel.num_elsewhere)
    cores = (device.num_threads or 1) * parallel.num_local
    shared = replace(device, num_threads=min(device.num_threads or 1, max(1, cores // here)))
    if device.device == "cpu":
        cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / here)
    config = replace(config, device_config=shared, cache_config=cache)
    for change in each(VllmConfig, "of_later_engine") if later else ():
        config = change(config)
    return config
