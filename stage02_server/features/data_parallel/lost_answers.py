"""The answer to a request whose engine died while others go on: a 503, as if its only engine had died."""

from __future__ import annotations

from stage02_server.errors import unavailable
from stage03_engine.frontend.features.data_parallel.in_flight import LOST
from stage03_engine.frontend.output_processor import OutputProcessor
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs
from stagetrace import trace


class LostAnswers:
    """A listener of AsyncLLM. It sees such a request before the output processor does, which would report an internal error."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor

    def received(self, outputs: EngineCoreOutputs) -> None:
        """End the requests of a step whose engine died."""
        for output in outputs.outputs:
            if output.result is not None and LOST in output.result:
                self._end(output)

    def _end(self, output: EngineCoreOutput) -> None:
        state = self._processor.request_states.get(output.request_id)
        if state is not None:
            if trace.on:
                trace.emit("request.aborted", req=output.request_id, reason="its engine died")
            self._processor.abort_requests([output.request_id])
            state.queue.put(unavailable(output.error or ""))

    def close(self) -> None:
        """Nothing to do: when the last engine is gone, every request gets that error anyway."""
