"""The answer to a request that ends because engines died while others go on: a 500 if it may be to blame, else a 503."""

from __future__ import annotations

from stage02_server.errors import APIError, unavailable
from stage03_engine.frontend.features.data_parallel.in_flight import LOST
from stage03_engine.frontend.output_processor import OutputProcessor
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs
from stagetrace import trace

_NO_RETRY = {"X-Should-Retry": "false"}
"""OpenAI's clients send a request again after a 500, unless this header says otherwise. What two engines died of must not come again."""


class LostAnswers:
    """A listener of AsyncLLM. It sees such a request before the output processor does, which would report an internal error."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor

    def received(self, outputs: EngineCoreOutputs) -> None:
        """End the requests that do not go on."""
        for output in outputs.outputs:
            if output.result is not None and LOST in output.result:
                self._end(output)

    def _end(self, output: EngineCoreOutput) -> None:
        state = self._processor.request_states.get(output.request_id)
        if state is not None:
            if trace.on:
                trace.emit("request.aborted", req=output.request_id, reason="its engine died")
            self._processor.abort_requests([output.request_id])
            state.queue.put(self._error(output))

    def _error(self, output: EngineCoreOutput) -> APIError:
        message, status = output.error or "", (output.result or {})[LOST]
        return (
            APIError(500, "InternalServerError", message, headers=_NO_RETRY) if status == 500 else unavailable(message)
        )

    def close(self) -> None:
        """Nothing to do: when the last engine is gone, every request gets that error anyway."""
