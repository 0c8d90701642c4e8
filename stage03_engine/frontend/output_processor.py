"""EngineCoreOutputs in, RequestOutputs out: detokenization, stop strings, and one collector per waiting request.

Source: vllm/v1/engine/output_processor.py (OutputProcessor, RequestState, RequestOutputCollector).
"""

from __future__ import annotations

import asyncio

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.features.parallel_sampling import ParentRequest
from stage03_engine.frontend.metrics import CompletedStats, IterationStats, RequestStats
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs, payload
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.params.audio import SpeechDetails
from stage03_engine.params.repetition_detection import REPETITION_DETECTED, find_repetition
from stage03_engine.sampling_params import RequestOutputKind
from stagetrace import trace


class RequestOutputCollector:
    """Hands outputs from the output handler to one `generate()`.

    Holds at most one output: when the consumer is slower than the engine, newer deltas are merged into the waiting one,
    so memory stays bounded and nothing is lost.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._aggregate = output_kind == RequestOutputKind.DELTA
        self._ready = asyncio.Event()
        self._output: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Never blocks. An exception replaces whatever waits and is raised by `get`."""
        if isinstance(self._output, RequestOutput) and isinstance(output, RequestOutput):
            self._output.add(output, self._aggregate)
        elif not isinstance(self._output, Exception):
            self._output = output
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raises what was put, if that was an exception."""
        await self._ready.wait()
        output, self._output = self._output, None
        self._ready.clear()
        assert output is not None
        if isinstance(output, Exception):
            raise output
        return output


class RequestState:
    """All that the front end knows about one running request."""

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        queue: RequestOutputCollector | None,
        parent: ParentRequest | None = None,
        index: int = 0,
    ) -> None:
        self.request = request
        self.parent = parent
        self.index = index  # among the answers of the parent
        self.prompt = prompt
        self.queue = queue
        self.detokenizer = IncrementalDetokenizer(tokenizer, request.sampling_params, request.prompt_token_ids)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.sampling_params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # in a stream of deltas: until they are given
        self._num_given = 0
        self._stream_interval = request.sampling_params.stream_interval or 1
        self.num_cached_tokens = 0
        self.pooled: list[bytes] | None = None
        self.speech: SpeechDetails | None = None
        self.stats = RequestStats(arrival=request.arrival_time, num_prompt_tokens=len(request.prompt_token_ids))

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
        if delta and not finished and not text:
            return None  # its tokens and logprobs go with the text that they become
        self._num_given = len(self.token_ids)
        completion = CompletionOutput(
            index=self.index,
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
            self.pooled,
            self.speech,
        )


class OutputProcessor:
    """Turns each step's outputs into what the callers wait for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.request_states: dict[str, RequestState] = {}
        self.parents: dict[str, ParentRequest] = {}
        if trace.on:
            trace.emit("output_processor.created")

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None = None, queue: RequestOutputCollector | None = None
    ) -> list[EngineCoreRequest]:
        """Expect outputs for this request. Returns what the engine core is to get: the request, or one child per answer.

        Raises ValueError when its id is already in use.
        """
        if request.request_id in self.request_states or request.request_id in self.parents:
            raise ValueError(f"request id {request.request_id} is already running")
        parent, children = None, [request]
        if request.sampling_params.num_answers > 1:
            parent = self.parents[request.request_id] = ParentRequest(request)
            children = parent.children
            if trace.on:
                trace.emit("request.fanned_out", req=request.request_id, children=len(children))
        for index, child in enumerate(children):
            self.request_states[child.request_id] = RequestState(child, prompt, self._tokenizer, queue, parent, index)
        if trace.on:
            trace.emit("request.registered", req=request.request_id)
        return children

    def process_outputs(
        self, outputs: list[EngineCoreOutput], stats: IterationStats
    ) -> tuple[list[RequestOutput], list[str]]:
        """Returns (outputs of requests that have no collector, ids that the engine must stop because of their text).

        Outputs of requests that are gone (aborted a moment ago) are ignored.
        """
        request_outputs: list[RequestOutput] = []
        reqs_to_abort: list[str] = []
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            if output.error is not None:
                self._refuse(
                    state,
                    RuntimeError(output.error)
                    if output.error_param is None
                    else InvalidRequestError(output.error, output.error_param),
                )
                continue
            end = self._take_in(state, output)
            if end is not None and output.finish_reason is None:
                reqs_to_abort.append(output.request_id)
            finish_reason, stop_reason = end or (output.finish_reason, output.stop_reason)
            stats.update(state.stats, output, finish_reason)
            if finish_reason is not None:
                self._finish(state, finish_reason)
            made = state.make_output(finish_reason, stop_reason)
            if made is not None and state.parent is not None:
                made = state.parent.take_in(output.request_id, made)
            if finish_reason is not None:
                self._forget(output.request_id)
                self._complete(state, stats)
            if made is not None:
                self._deliver(state, made, request_outputs)
        return request_outputs, reqs_to_abort

    def _take_in(self, state: RequestState, output: EngineCoreOutput) -> tuple[FinishReason, str] | None:
        """Add new tokens, logprobs and text to the state; returns what ends the request that the engine does not know of: a
        stop string, or a repetition. Only tokens up to there count."""
        before = state.detokenizer.safe
        count = len(output.new_token_ids)
        repeats_after = self._find_repetition(state, output)
        by_token = output.finish_reason == FinishReason.STOP and not output.ended_by_grammar and repeats_after is None
        stop = state.detokenizer.update(output.new_token_ids[:repeats_after], finished_by_token=by_token)
        if repeats_after is not None:
            count = repeats_after
        if stop is not None:  # what several tokens at once brought behind the stop string does not count
            count = state.detokenizer.num_tokens - len(state.token_ids)
        state.token_ids.extend(output.new_token_ids[:count])
        state.num_cached_tokens = output.num_cached_tokens
        result = output.result or {}
        state.pooled = result.get("pooled")
        state.speech = payload(result["speech"], SpeechDetails) if "speech" in result else None
        if state.logprobs is not None and output.new_logprobs:
            state.logprobs.extend(output.new_logprobs[:count])
            state.cumulative_logprob += sum(entry.logprobs[0] for entry in output.new_logprobs[:count])
        if "prompt_logprobs" in result:
            state.prompt_logprobs = [None, *payload(result["prompt_logprobs"], list[TokenLogprobs])]
        if trace.on:
            new = max(0, state.detokenizer.safe - before)
            trace.emit(
                "request.detokenized", req=output.request_id, num_tokens=len(output.new_token_ids), characters=new,
                text=state.detokenizer.text[before:][:new] if trace.prompts else None,
                token_ids=output.new_token_ids if trace.prompts else [],
            )  # fmt: skip
            if stop is not None:
                trace.emit("request.stop_matched", req=output.request_id, stop=stop if trace.prompts else None)
        if stop is not None:
            return FinishReason.STOP, stop
        return None if repeats_after is None else (FinishReason.REPETITION, REPETITION_DETECTED)

    def _find_repetition(self, state: RequestState, output: EngineCoreOutput) -> int | None:
        """After how many of the new tokens the request repeats itself. What the engine says of the last one goes first."""
        params, new = state.request.sampling_params, output.new_token_ids
        if params.repetition_detection is None:
            return None
        seen = new if output.finish_reason is None else new[:-1]
        found = find_repetition(state.token_ids, seen, params.repetition_detection, params.min_tokens)
        if found is None:
            return None
        if trace.on:
            trace.emit("request.repetition_found", req=output.request_id, pattern_size=found[1])
        return found[0]

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        state.detokenizer.finish()
        if trace.on:
            trace.emit(
                "request.finished",
                req=state.request.request_id,
                reason=str(reason),
                num_output_tokens=len(state.token_ids),
            )

    def _complete(self, state: RequestState, stats: IterationStats) -> None:
        """Account for a caller's request when its last answer ends."""
        longest, params = len(state.token_ids), state.request.sampling_params
        if state.parent is not None:
            longest = state.parent.longest = max(longest, state.parent.longest)
            if state.parent.running:
                return
            params = state.parent.params
        stats.completed.append(CompletedStats(params.n, params.max_tokens, longest))

    def _refuse(self, state: RequestState, error: RuntimeError | InvalidRequestError) -> None:
        """The engine could not take this request: whoever waits for it hears why."""
        self._forget(state.request.request_id)
        if state.queue is None:
            raise error
        state.queue.put(error)

    def _deliver(self, state: RequestState, made: RequestOutput, request_outputs: list[RequestOutput]) -> None:
        if state.queue is None:
            request_outputs.append(made)
            return
        state.queue.put(made)
        if trace.on:
            trace.emit("request.collected", req=made.request_id, finished=made.finished)

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        """Forget requests; returns those that the engine core knows and that were still running: the children of a parent."""
        known: list[str] = []
        for request_id in request_ids:
            parent = self.parents.get(request_id)
            known += [request_id] if parent is None else sorted(parent.running)
        return [request_id for request_id in known if self._forget(request_id)]

    def end_request(self, request_id: str) -> list[str]:
        """End a request as the engine core does, with FinishReason.ABORT as its last output; returns those of the core."""
        parent = self.parents.get(request_id)
        running = [request_id] if parent is None else sorted(parent.running)
        ends = [EngineCoreOutput(i, [], finish_reason=FinishReason.ABORT) for i in running]
        for end in ends:
            end.num_cached_tokens = self.request_states[end.request_id].num_cached_tokens
        self.process_outputs(ends, IterationStats())
        return running

    def _forget(self, request_id: str) -> bool:
        """Drop one request of the engine core, and its parent with its last child. False when it is not known."""
        state = self.request_states.pop(request_id, None)
        if state is not None and state.parent is not None:
            state.parent.running.discard(request_id)
            if not state.parent.running:
                self.parents.pop(state.parent.request_id, None)
        return state is not None

    def propagate_error(self, error: Exception) -> None:
        """The engine is gone: every waiting request ends with this error."""
        for state in self.request_states.values():
            if state.queue is not None:
                state.queue.put(error)
        self.request_states.clear()
        self.parents.clear()
