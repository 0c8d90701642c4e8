"""The answer of a request whose engine died while others serve on: the error that a dead engine has always been, 503."""

from __future__ import annotations

from stage02_server.errors import unavailable
from stage03_engine.frontend.features.data_parallel.in_flight import LOST
from stage03_engine.frontend.output_processor import OutputProcessor
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs
from stagetrace import trace


class LostAnswers:
    """A listener of AsyncLLM: it hears of such a request before the output processor, for which any error is the server's own."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor

    def received(self, outputs: EngineCoreOutputs) -> None:
        """End the requests of a step that were lost."""
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
        """The last engine is gone: every request hears of it in the usual way."""
