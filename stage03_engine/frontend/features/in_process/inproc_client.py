"""The engine core in the caller's own process (vllm/v1/engine/core_client.py InprocClient)."""

from __future__ import annotations

from typing import Any, Protocol

from stage03_engine.args.check import check_one_engine
from stage03_engine.config import VllmConfig
from stage03_engine.frontend.core_client import EngineCoreClient
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest
from stage03_engine.mixins import load
from stagetrace import trace

MAKE_CORE = "stage03_engine.core.engine_core_proc:make_core"


class EngineCoreLike(Protocol):
    """What InprocClient needs of an engine core, which is handed in: the front end does not import it."""

    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def call(self, method: str, *args: Any) -> Any: ...
    def step(self) -> EngineCoreOutputs: ...
    def shutdown(self) -> None: ...


class InprocClient(EngineCoreClient):
    """The engine core in this process: each `get_output` runs one step."""

    def __init__(self, engine_core: EngineCoreLike) -> None:
        self._core = engine_core
        if trace.on:
            trace.emit("client.created", kind="InprocClient", engine_ranks=[0])

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)

    def call(self, method: str, *args: Any) -> Any:
        return self._core.call(method, *args)

    def get_output(self) -> EngineCoreOutputs:
        return self._core.step()

    def shutdown(self) -> None:
        self._core.shutdown()


def in_this_process(config: VllmConfig) -> InprocClient:
    """A client with a new engine core. The core's modules import torch, so they are imported only here. Raises ConfigError if the
    settings ask for several engines."""
    check_one_engine(config, "LLM")
    return InprocClient(load(MAKE_CORE)(config))
