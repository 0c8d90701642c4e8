"""n and best_of: several answers to one prompt are one request for the caller, and one per answer for the engine core.

Source: vllm/v1/engine/parallel_sampling.py (ParentRequest).
"""

from __future__ import annotations

import msgspec

from stage03_engine.frontend.output_processor import OutputQueue
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import RequestOutputKind
from stagetrace import trace


def fan_out(request: EngineCoreRequest, queue: OutputQueue) -> list[tuple[EngineCoreRequest, OutputQueue]]:
    """One request per answer, each with the queue that merges its outputs into those of `request`."""
    parent = ParentRequest(request)
    if trace.on:
        trace.emit("request.fanned_out", req=request.request_id, children=len(parent.children))
    return [(child, ChildQueue(parent, index, queue)) for index, child in enumerate(parent.children)]


class ChildQueue:
    """Where the outputs of one answer go."""

    def __init__(self, parent: ParentRequest, index: int, queue: OutputQueue) -> None:
        self._parent, self._index, self._queue = parent, index, queue

    def put(self, output: RequestOutput | Exception) -> None:
        """Pass on what the caller may see now. An exception ends the whole request."""
        if isinstance(output, Exception):
            self._queue.put(output)
            return
        for answer in output.outputs:
            answer.index = self._index
        if (merged := self._parent.merge(output)) is not None:
            self._queue.put(merged)


class ParentRequest:
    """The request of the caller. Its children share the prompt and differ in their random streams."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.params = request.sampling_params
        self.children = [self._child(request, index) for index in range(self.params.num_answers)]
        self.running = {child.request_id for child in self.children}
        self._complete: list[CompletionOutput] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._held: RequestOutput | None = None  # until the prompt's logprobs arrive
        self._num_cached_tokens = 0  # as the first child found them; the others find what the first has computed

    @property
    def _selects(self) -> bool:
        return self.params.num_answers > self.params.n

    def _child(self, request: EngineCoreRequest, index: int) -> EngineCoreRequest:
        params = self.params
        own = msgspec.structs.replace(
            params,
            n=1,
            best_of=None,
            seed=None if params.seed is None else params.seed + index,
            # To know which answers are best, their log-probabilities must be known. The prompt's are the same for all.
            logprobs=0 if params.logprobs is None and self._selects else params.logprobs,
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )
        return msgspec.structs.replace(request, request_id=f"{index}_{request.request_id}", sampling_params=own)

    def merge(self, output: RequestOutput) -> RequestOutput | None:
        """An output of a child as one of the parent; None while there is nothing to show.

        With output kind FINAL_ONLY that is until the last child ends: then come all answers, or the best ones of them.
        """
        child_id = output.request_id
        if output.finished:
            self.running.discard(child_id)
        if child_id == self.children[0].request_id:
            self._num_cached_tokens = output.num_cached_tokens
        output.request_id, output.finished = self.request_id, not self.running
        output.num_cached_tokens = self._num_cached_tokens
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        if self.params.output_kind != RequestOutputKind.FINAL_ONLY:
            return self._in_order(output)
        self._complete += output.outputs
        if self.running:
            return None
        output.outputs, output.prompt_logprobs = self._answers(), self._prompt_logprobs
        return output

    def _in_order(self, output: RequestOutput) -> RequestOutput | None:
        """In a stream the prompt's logprobs come with the first output. They are the first child's, so others wait for it."""
        if self._held is not None:
            self._held.add(output, aggregate=self.params.output_kind == RequestOutputKind.DELTA)
            output, self._held = self._held, None
        if self.params.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._held = output
            return None
        return output

    def _answers(self) -> list[CompletionOutput]:
        answers = sorted(self._complete, key=lambda answer: answer.index)
        if not self._selects:
            return answers
        best = sorted(answers, key=lambda answer: -(answer.cumulative_logprob or 0.0))[: self.params.n]
        for index, answer in enumerate(best):
            answer.index = index
            answer.logprobs = None if self.params.logprobs is None else answer.logprobs
        return best
