"""The output processor: from what a step of the engine added to each request, to what its caller receives.

What you meet here, all given:
EngineCoreOutput     one request in one step: request_id, new_token_ids, new_logprobs (a TokenLogprobs per token, or None),
                     finish_reason (None while it runs), stop_reason, num_cached_tokens, result; for a request that the engine
                     refused error, error_param and busy
TokenLogprobs        one position: token_ids and logprobs, the chosen token first, then the likeliest ones
CompletionOutput     one answer: index, text, token_ids, logprobs, finish_reason, stop_reason, cumulative_logprob, stats
RequestOutput        what the caller gets: request_id, prompt, prompt_token_ids, outputs (a list of CompletionOutput), finished,
                     prompt_logprobs, num_cached_tokens, result
RequestOutputKind    CUMULATIVE: each output holds all so far · DELTA: only what is new · FINAL_ONLY: one output, at the end
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stage03_engine.errors import BusyError, InvalidRequestError  # noqa: F401 - for _refuse
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.frontend.output_processor import OutputEnd, OutputProcessor as Registry, RequestState as Mechanics
from stage03_engine.messages import EngineCoreOutput, FinishReason, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput  # noqa: F401 - for you to make
from stage03_engine.sampling_params import RequestOutputKind
from stagetrace import trace

if TYPE_CHECKING:
    from stage02_server.features.logprobs.fields import CompletionLogProbs


def tell_text(state: Mechanics, output: EngineCoreOutput, shown: int, stop: str | None) -> None:
    """Given: tell the trace what became text. `shown` is state.detokenizer.safe as it was before."""
    if trace.on:
        characters = max(0, state.detokenizer.safe - shown)
        trace.emit(
            "request.detokenized", req=output.request_id, num_tokens=len(output.new_token_ids), characters=characters,
            text=state.detokenizer.text[shown:][:characters] if trace.prompts else None,
            token_ids=output.new_token_ids if trace.prompts else [],
        )  # fmt: skip
        if stop is not None:
            trace.emit("request.stop_matched", req=output.request_id, stop=stop if trace.prompts else None)


def tell_collected(output: RequestOutput | Exception) -> None:
    """Given: tell the trace that an output waits for its reader."""
    if trace.on and isinstance(output, RequestOutput):
        trace.emit("request.collected", req=output.request_id, finished=output.finished)


class RequestOutputCollector:
    """Hands outputs from the output handler to the one task that generates for a client. Holds at most one output: when the client is
    slower than the engine, newer ones are merged into the waiting one, so that memory stays bounded and nothing is lost."""

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._aggregate = output_kind == RequestOutputKind.DELTA
        self._ready: asyncio.Future[None] | None = None  # what `get` waits for
        self._output: RequestOutput | Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Take an output; never blocks. Wakes `get`, if it waits. At the end: tell_collected(output).

        If another output still waits, the newer one is merged into it. For each answer of `outputs` (they are told apart by their
        `index`): with DELTA text, token_ids and logprobs are appended to the waiting ones, and finish_reason, stop_reason,
        cumulative_logprob and stats are the newer ones; otherwise the newer answer replaces the waiting one. An answer that only
        one of the two has stays. Of the whole, finished is the newer one's; so are prompt_logprobs and result, unless they are None;
        the rest stays as it is. (RequestOutput.add, in stage03_engine/outputs.py, does all this; write it yourself, or call it.)
        An exception replaces a waiting output, and nothing replaces an exception.
        """
        raise NotImplementedError

    async def get(self) -> RequestOutput:
        """Wait for the next output, and take it. Raises it if it is an exception."""
        raise NotImplementedError


class RequestState(Mechanics):
    """What the front end knows about one running request. Given:

    self.request             .request_id, .prompt_token_ids, .sampling_params (.output_kind, ...); self.prompt is its text
    self.detokenizer         .update(token_ids, finished_by_token=...) adds text, and returns the stop string that appeared, or None;
                             .num_tokens counts the tokens of the answer up to the one that completed the stop string;
                             .next_text(delta) is the text that may be sent: all of it, or with delta=True what was not returned before
    self.token_ids           the tokens of the answer so far; for you to extend
    self.logprobs            a list of a TokenLogprobs for each of them, or None if nobody asked; for you to extend
    self.cumulative_logprob  the sum of the chosen tokens' log-probabilities
    self.num_cached_tokens, self.result    as in the newest EngineCoreOutput
    self.stats               goes out with the last output
    self._num_given          how many tokens have gone out, 0 at first; for you to keep
    self._stream_interval    how many tokens to wait for between two outputs
    """

    def append(self, output: EngineCoreOutput) -> OutputEnd | None:
        """Add new tokens, their log-probabilities and their text. Returns OutputEnd(num_tokens, finish_reason, stop_reason) if a stop
        string ends the request: how many of the new tokens count, FinishReason.STOP, and the stop string. Otherwise None.

        Tokens after the one that completed the stop string do not count, nor do their log-probabilities. A finish_reason STOP of the
        engine says that the newest token is an end-of-text or stop token, which is no text: finished_by_token=True. (If
        output.ends_with_text is set it is text all the same.) The detokenizer then does not count this token, but you do: it has its
        place in token_ids and logprobs. At the end, in every step: tell_text(self, output, shown, stop).
        What features add beside this (self.prompt_logprobs) you may leave out.
        """
        raise NotImplementedError

    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        """The output to hand over now, or None when there is nothing to show yet. finish_reason None: the request still runs.

        Nothing is shown before the end with FINAL_ONLY; nor, after the first output, before _stream_interval further tokens have
        come. With DELTA nothing is shown without new text either, except at the end: tokens and log-probabilities wait, and go
        out together with their text. The answer has index 0, and finish_reason as a text (str(finish_reason), None while it runs);
        logprobs and cumulative_logprob are None if nobody asked; stats only at the end.
        """
        raise NotImplementedError


class OutputProcessor(Registry):
    """Turns the outputs of a step into RequestOutputs. Given:

    self.request_states      request id -> RequestState of each request that runs; state.queue.put(...) hands something to its caller
                                              (a request without a queue of its own has one that collects for _returned)
    self._refuse(state, error, error_param, kind)    the engine refused the request: tell its caller with an error of this kind, and
                                              forget it. kind is BusyError if output.busy is set, otherwise InvalidRequestError
    self._finish(state, reason, stats)        the request ends: the text that was held back is free, the request is forgotten
    self._returned.take()                     the outputs of requests without a queue, since the last call
    """

    def process_outputs(
        self, outputs: list[EngineCoreOutput], stats: IterationStats
    ) -> tuple[list[RequestOutput], list[str]]:
        """Returns (outputs of requests without a queue, ids of the requests that the engine must abort).

        For each output, in order: ignore requests that are unknown (just aborted); one with an `error` is refused, and that is all;
        append. If that returns an OutputEnd, its finish_reason and stop_reason count instead of the engine's, and the engine must
        abort the request, unless it had ended it itself in this step. Then stats.update(state.stats, output, finish_reason),
        _finish if there is a finish_reason, and put what make_output makes, if anything.
        """
        raise NotImplementedError


def add_token(
    result: CompletionLogProbs, texts: dict[int, str], position: TokenLogprobs, num_top: int, offset: int, as_ids: bool
) -> None:
    """Add one token to OpenAI's four lists, result.text_offset, .tokens, .token_logprobs and .top_logprobs.

    `texts` gives the text of each token id of the position; with `as_ids` a token is called "token_id:5" instead. `offset` is where in
    the answer's text the token begins. top_logprobs gets {name: log-probability} of the chosen token and the first `num_top` others.
    If several of these have the same text, the last one counts. JSON has no -Infinity: nothing is below -9999.0.
    """
    raise NotImplementedError
