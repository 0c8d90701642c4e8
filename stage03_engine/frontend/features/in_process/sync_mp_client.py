"""An engine process driven by blocking calls: `LLM(multiprocess=True)` (vllm/v1/engine/core_client.py SyncMPClient)."""

from __future__ import annotations

import itertools
from typing import Any

import zmq

from stage03_engine.args.check import check_one_engine
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, InvalidRequestError
from stage03_engine.frontend.core_client import EngineCoreClient, bind_sockets, decode_outputs, encode_message
from stage03_engine.frontend.engine_process import POLL_MS, EngineProcess
from stage03_engine.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityRequest,
)
from stagetrace import trace


class SyncMPClient(EngineCoreClient):
    """An engine process, driven by blocking calls. Raises ConfigError if the settings ask for several."""

    def __init__(self, config: VllmConfig) -> None:
        check_one_engine(config, "LLM")
        self._process = EngineProcess(config)
        self._context = zmq.Context()
        self._input, self._output = bind_sockets(self._context, self._process)
        self._closed, self._call_ids = False, itertools.count()
        try:
            self.ready = self._process.shake_hands()
            self._input.recv_multipart()  # the engine's empty first message: the ROUTER knows its peer from now on
        except BaseException:
            self.shutdown()
            raise
        if trace.on:
            trace.emit("client.created", kind="SyncMPClient", engine_ranks=[0])

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(EngineCoreRequestType.ADD, request, request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._send(EngineCoreRequestType.ABORT, AbortRequests(request_ids))

    def _send(self, request_type: EngineCoreRequestType, payload: Any, request_id: str | None = None) -> None:
        self._input.send_multipart([self._process.identity, *encode_message(request_type, payload, request_id)])

    def call(self, method: str, *args: Any) -> Any:
        """Only between requests, as in `LLM`: outputs that arrive before the answer are dropped, and so is the answer to a call that was interrupted."""
        call_id = next(self._call_ids)
        self._send(EngineCoreRequestType.UTILITY, UtilityRequest(call_id, method, args=list(args)))
        while (result := self.get_output().utility_result) is None or result.call_id != call_id:
            pass
        if result.error is not None:
            raise InvalidRequestError(result.error)
        return result.result

    def get_output(self) -> EngineCoreOutputs:
        while not self._output.poll(POLL_MS):
            if not self._process.alive and not self._output.poll(POLL_MS):
                raise EngineDeadError("The engine process is gone.")
        return decode_outputs(self._output.recv_multipart())

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._process.shutdown()
        self._context.destroy(linger=0)
