"""EngineCoreOutputs in, RequestOutputs out: detokenization, stop strings, and one collector per waiting request.

Source: vllm/v1/engine/output_processor.py (OutputProcessor, RequestState, RequestOutputCollector).
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

from stage03_engine.errors import BusyError, InvalidRequestError
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.metrics import CompletedStats, IterationStats, RequestStats
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs, payload
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.plugins import find
from stage03_engine.sampling_params import RequestOutputKind
from stagetrace import trace


class OutputQueue(Protocol):
    """Where the outputs of a request go."""

    def put(self, output: RequestOutput | Exception) -> None: ...


class RequestOutputCollector:
    """Hands outputs from the output handler to one `generate()`.

    Holds at most one output: when the consumer is slower than the engine, newer deltas are merged into the waiting one,
    so memory stays bounded and nothing is lost.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._aggregate = output_kind == RequestOutputKind.DELTA
        # What `get` waits for; an asyncio.Event would take three times as long.
        self._ready: asyncio.Future[None] | None = None
        self._output: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Never blocks. An exception replaces a waiting output, and `get` raises it."""
        if isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput):
            self._output.add(output, self._aggregate)
        elif not isinstance(self._output, Exception):
            self._output = output
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        if trace.on and isinstance(output, RequestOutput):
            trace.emit("request.collected", req=output.request_id, finished=output.finished)

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raises it if it is an exception."""
        while self._output is None:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
        output, self._output = self._output, None
        if isinstance(output, Exception):
            raise output
        return output


class _Returned:
    """Collects the outputs of requests without a queue of their own: `process_outputs` returns them."""

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []

    def put(self, output: RequestOutput | Exception) -> None:
        """Raises `output` if it is an exception."""
        if isinstance(output, Exception):
            raise output
        self._outputs.append(output)

    def take(self) -> list[RequestOutput]:
        """What was put since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs


class OutputEnd(NamedTuple):
    """Why the front end ends a request, and how many of the newest tokens still count."""

    num_tokens: int
    finish_reason: FinishReason
    stop_reason: str


class RequestState:
    """Everything the front end knows about one running request."""

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        queue: OutputQueue,
        external_req_id: str,
        completed: CompletedStats,
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.prompt = prompt
        self.queue = queue
        self.external_req_id = external_req_id  # the caller's name for it
        self.completed = completed
        self.detokenizer = IncrementalDetokenizer(tokenizer, params, request.prompt_token_ids)
        self._waits_for_text = tokenizer.makes_text
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # in a stream of deltas: until they are sent
        self.num_cached_tokens = 0
        self.result: dict[str, Any] | None = None  # what features added to the newest output
        self.stats = RequestStats(arrival=request.arrival_time, num_prompt_tokens=len(request.prompt_token_ids))
        self._num_given = 0
        self._stream_interval = params.stream_interval or 1

    def append(self, output: EngineCoreOutput) -> OutputEnd | None:
        """Add new tokens, their logprobs and their text. Returns the end of the request if a stop string ends it: tokens after
        the stop string do not count."""
        new, shown = output.new_token_ids, self.detokenizer.safe
        end = None
        by_token = output.finish_reason == FinishReason.STOP and not output.ends_with_text
        stop = self.detokenizer.update(new, finished_by_token=by_token)
        if stop is not None:
            new = new[: self.detokenizer.num_tokens - len(self.token_ids)]
            end = OutputEnd(len(new), FinishReason.STOP, stop)
        self.token_ids.extend(new)
        self.num_cached_tokens = output.num_cached_tokens
        if self.logprobs is not None and output.new_logprobs:
            self.logprobs.extend(output.new_logprobs[: len(new)])
            self.cumulative_logprob += sum(entry.logprobs[0] for entry in output.new_logprobs[: len(new)])
        self.result = output.result
        if output.result is not None and "prompt_logprobs" in output.result:
            self.prompt_logprobs = [None, *payload(output.result["prompt_logprobs"], list[TokenLogprobs])]
        if trace.on:
            characters = max(0, self.detokenizer.safe - shown)
            trace.emit(
                "request.detokenized", req=output.request_id, num_tokens=len(output.new_token_ids), characters=characters,
                text=self.detokenizer.text[shown:][:characters] if trace.prompts else None,
                token_ids=output.new_token_ids if trace.prompts else [],
            )  # fmt: skip
            if stop is not None:
                trace.emit("request.stop_matched", req=output.request_id, stop=stop if trace.prompts else None)
        return end

    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        """The output to hand over now, or None when there is nothing to show yet."""
        kind = self.request.sampling_params.output_kind
        finished = finish_reason is not None
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            return None
        if not finished and self._num_given and len(self.token_ids) < self._num_given + self._stream_interval:
            return None
        delta = kind == RequestOutputKind.DELTA
        start = self._num_given if delta else 0
        text = self.detokenizer.next_text(delta)
        if delta and not finished and not text and self._waits_for_text:
            return None  # its tokens and logprobs go out with their text
        self._num_given = len(self.token_ids)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=self.token_ids[start:],
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            stats=self.stats if finished else None,
        )
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None
        return RequestOutput(
            self.request.request_id,
            self.prompt,
            self.request.prompt_token_ids,
            [completion],
            finished,
            prompt_logprobs,
            self.num_cached_tokens,
            self.result,
        )


class OutputProcessor:
    """Turns each step's outputs into RequestOutputs for the callers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._returned = _Returned()
        self.request_states: dict[str, RequestState] = {}
        self.external_req_ids: dict[
            str, list[str]
        ] = {}  # a caller's request -> its requests in the engine core that still run
        if trace.on:
            trace.emit("output_processor.created")

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None = None, queue: OutputQueue | None = None
    ) -> list[EngineCoreRequest]:
        """Expect outputs for this request. Returns what to send to the engine core: the request itself, or with n above 1
        one request per answer.

        Raises ValueError if its id is already in use, InvalidRequestError if the engine was built without what it asks for.
        """
        request_id, params = request.request_id, request.sampling_params
        if request_id in self.request_states or request_id in self.external_req_ids:
            raise ValueError(f"request id {request_id} is already running")
        parts: list[tuple[EngineCoreRequest, OutputQueue]] = [(request, queue or self._returned)]
        if params.num_answers > 1:
            if (fan_out := find("engine", "fan_out")) is None:
                raise InvalidRequestError("n: this engine was built without it.", "n")
            parts = fan_out(*parts[0])
        completed = CompletedStats(params.n, params.max_tokens, parts=len(parts))
        states = [RequestState(part, prompt, self._tokenizer, to, request_id, completed) for part, to in parts]
        self.request_states.update((state.request.request_id, state) for state in states)
        self.external_req_ids[request_id] = [part.request_id for part, _ in parts]
        if trace.on:
            trace.emit("request.registered", req=request_id)
        return [part for part, _ in parts]

    def process_outputs(
        self, outputs: list[EngineCoreOutput], stats: IterationStats
    ) -> tuple[list[RequestOutput], list[str]]:
        """Returns (outputs of requests without a queue, ids of requests that the engine must stop because of their text).

        Outputs of requests that were just aborted are ignored. An answer that cannot be made ends with the error that stopped it; the
        others go on.
        """
        reqs_to_abort: list[str] = []
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            if output.error is not None:
                self._refuse(state, output.error, output.error_param, BusyError if output.busy else InvalidRequestError)
                continue
            try:
                end = state.append(output)
                finish_reason, stop_reason = output.finish_reason, output.stop_reason
                if end is not None:
                    _, finish_reason, stop_reason = end
                stats.update(state.stats, output, finish_reason)
                if finish_reason is not None:
                    self._finish(state, finish_reason, stats)
                made: RequestOutput | Exception | None = state.make_output(finish_reason, stop_reason)
            except Exception as error:
                self._forget(output.request_id)
                made, finish_reason = error, FinishReason.ABORT
            if finish_reason is not None and output.finish_reason is None:
                reqs_to_abort.append(output.request_id)
            if made is not None:
                state.queue.put(made)
        return self._returned.take(), reqs_to_abort

    def _finish(self, state: RequestState, reason: FinishReason, stats: IterationStats) -> None:
        request_id, num_output_tokens = state.request.request_id, len(state.token_ids)
        state.detokenizer.finish()
        if trace.on:
            trace.emit("request.finished", req=request_id, reason=str(reason), num_output_tokens=num_output_tokens)
        self._forget(request_id)
        stats.complete(state.completed, num_output_tokens)

    def _refuse(self, state: RequestState, message: str, param: str | None, kind: type[InvalidRequestError]) -> None:
        """The engine core refused this request; `param` is the field to blame, if any."""
        self._forget(state.request.request_id)
        state.queue.put(RuntimeError(message) if param is None else kind(message, param))

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        """Forget requests, by their callers' ids or the engine core's; returns the engine core's ids of those that ran."""
        running = [part for each in request_ids for part in self.external_req_ids.get(each, [each])]
        return [request_id for request_id in running if self._forget(request_id)]

    def _forget(self, request_id: str) -> bool:
        """Drop one request of the engine core. False if it is unknown."""
        state = self.request_states.pop(request_id, None)
        if state is None:
            return False
        siblings = self.external_req_ids[state.external_req_id]
        siblings.remove(request_id)
        if not siblings:
            del self.external_req_ids[state.external_req_id]
        return True

    def propagate_error(self, error: Exception) -> None:
        """The engine is gone: every waiting request ends with this error."""
        for state in self.request_states.values():
            state.queue.put(error)
        self.request_states.clear()
        self.external_req_ids.clear()
