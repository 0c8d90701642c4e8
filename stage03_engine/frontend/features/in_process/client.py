"""The engine core for a caller without an event loop (vllm/v1/engine/core_client.py, EngineCoreClient)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest


class EngineCoreClient(ABC):
    """What such a caller needs."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests and free their blocks."""

    @abstractmethod
    def call(self, method: str) -> bool:
        """Call one of the engine core's methods that are not part of serving requests; False if it did nothing."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step; only call it while requests are unfinished. Raises EngineDeadError."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. May be called twice."""
