"""Beam search on top of the engine: the engine only returns the likely next tokens of some sequences.

Each step sends one request per beam: its whole sequence, one token of output, and the 2 x beam_width most likely candidates.
Results are those of transformers' `generate(num_beams=...)`. vLLM: entrypoints/generate/beam_search/offline.py and online.py,
`beam_search`, which scores by other rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.mixins import load
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.plugins import wanted
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.llm import LLM, AnyPrompt

MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search. A finished sequence of n tokens has the score (sum of its logprobs) / n ** length_penalty.

    `early_stopping`: end with the first `beam_width` finished sequences, whatever the others might score.
    Raises InvalidRequestError; the width is called n there, as in a request.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"n, the beam width, must be in [1, {MAX_BEAM_WIDTH}] with use_beam_search, got {self.beam_width}.", "n"
            )
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            limit = f"{MAX_LENGTH_PENALTY:g}"
            message = f"length_penalty must be in [-{limit}, {limit}], got {self.length_penalty}."
            raise InvalidRequestError(message, "length_penalty")

    def prompt_params(self) -> SamplingParams:
        """The settings with which the InputProcessor checks the prompt and resolves max_tokens."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )


@dataclass(frozen=True)
class Beam:
    """A sequence: its output tokens, the sum of their logprobs, and once it is finished its score."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    score: float = -math.inf


class BeamSearch:
    """The search over one prompt. Plain Python: `step_requests` says what to ask the engine, `advance` takes the answers."""

    def __init__(self, request: EngineCoreRequest, params: BeamSearchParams, vocab_size: int) -> None:
        self.request = request
        self.params = params
        settings = request.sampling_params
        assert settings.max_tokens is not None, "made by the InputProcessor"
        self._max_tokens = settings.max_tokens
        self._eos = None if settings.ignore_eos else request.eos_token_id
        # Each beam can end in one way only, so of twice as many candidates enough continue.
        self._num_candidates = 2 * params.beam_width
        self._step_params = msgspec.structs.replace(
            settings,
            temperature=0.0,
            max_tokens=1,
            logprobs=0,
            num_candidates=min(self._num_candidates, vocab_size),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.running = [Beam()]
        self.finished: list[Beam] = []  # the best so far, in descending order of their scores
        self.done = False
        if trace.on:
            trace.emit(
                "beam.start", req=request.request_id, beam_width=params.beam_width, max_tokens=settings.max_tokens,
                num_prompt_tokens=len(request.prompt_token_ids), length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
            )  # fmt: skip

    def step_requests(self) -> list[EngineCoreRequest]:
        """One request per running beam."""
        length = len(self.running[0].token_ids)
        return [
            msgspec.structs.replace(
                self.request,
                request_id=f"beam{index}.{length}_{self.request.request_id}",
                prompt_token_ids=[*self.request.prompt_token_ids, *beam.token_ids],
                sampling_params=self._step_params,
            )
            for index, beam in enumerate(self.running)
        ]

    def advance(self, answers: list[TokenLogprobs]) -> None:
        """Go one token further: `answers[i]` holds the candidates of running beam i, after the greedy token."""
        width = self.params.beam_width
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, answer in zip(self.running, answers, strict=True)
            for token_id, logprob in zip(answer.token_ids[1:], answer.logprobs[1:], strict=True)
        ]
        candidates = sorted(candidates, key=lambda beam: -beam.logprob)[: self._num_candidates]
        length = len(candidates[0].token_ids)
        scale = length**self.params.length_penalty
        # Only the best `width` candidates may finish; the others ensure that enough continue.
        ended = [beam for beam in candidates[:width] if self._ends(beam)]
        ended = [Beam(beam.token_ids, beam.logprob, beam.logprob / scale) for beam in ended]
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.score)[:width]
        self.running = [beam for beam in candidates if not self._ends(beam)][:width]
        full = len(self.finished) == width
        # As in transformers: what runs is judged by the score that it would have if it ended here.
        hopeless = full and bool(self.running) and self.running[0].logprob / scale <= self.finished[-1].score
        self.done = not self.running or hopeless or (full and self.params.early_stopping)
        if trace.on:
            running, finished = len(self.running), len(self.finished)
            trace.emit("beam.step", req=self.request.request_id, length=length, running=running, finished=finished)

    def _ends(self, beam: Beam) -> bool:
        return beam.token_ids[-1] == self._eos or len(beam.token_ids) == self._max_tokens

    def output(self, prompt: str | None, tokenizer: Tokenizer) -> RequestOutput:
        """The finished sequences, the best first."""
        skip = self.request.sampling_params.skip_special_tokens
        answers = []
        for index, beam in enumerate(self.finished):
            stopped = beam.token_ids[-1] == self._eos
            text_ids = list(beam.token_ids[:-1] if stopped else beam.token_ids)
            text, reason = tokenizer.decode(text_ids, skip), "stop" if stopped else "length"
            answers.append(CompletionOutput(index, text, list(beam.token_ids), None, reason, None, beam.logprob))
        best = answers[0]
        self.trace_end(str(best.finish_reason), len(best.token_ids))
        return RequestOutput(self.request.request_id, prompt, self.request.prompt_token_ids, answers, finished=True)

    def trace_end(self, reason: str, num_output_tokens: int = 0) -> None:
        """Trace that the search is over: the reason and the length of the best sequence."""
        if trace.on:
            req, sequences = self.request.request_id, len(self.finished)
            trace.emit(
                "beam.finished", req=req, reason=reason, sequences=sequences, num_output_tokens=num_output_tokens
            )


def candidates_of(output: RequestOutput) -> TokenLogprobs:
    """The candidates in the answer to one step request."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "asked for by the step"
    return logprobs[0]


async def search(
    engine: AsyncLLM, request: EngineCoreRequest, params: BeamSearchParams, prompt: str | None = None
) -> AsyncGenerator[RequestOutput, None]:
    """Search over a prompt (`request` is made with `params.prompt_params()`); yields one output, with every sequence.

    Closing or cancelling the iterator aborts what runs in the engine. Raises EngineDeadError.
    """
    beams = BeamSearch(request, params, engine.vllm_config.shape.vocab_size)
    with contextlib.ExitStack() as stack:
        for name in request.sampling_params.hooks("series"):
            stack.enter_context(load(name)(engine, request))
        await run_search(beams, lambda each: engine.generate(each, each.sampling_params, each.request_id))
    yield beams.output(prompt, engine.tokenizer)


def search_all(
    llm: LLM, prompts: AnyPrompt | Sequence[AnyPrompt], params: BeamSearchParams, lora_request: Any = None
) -> list[RequestOutput]:
    """`LLM.beam_search`: the `beam_width` best sequences for each prompt, the best first; all prompts advance together. A `lora_request` names
    the adapter for all, as in `LLM.generate`.

    Raises InvalidRequestError before anything runs if a prompt or a setting is impossible.
    """
    batch = llm.as_list(prompts)
    if any(hasattr(prompt, "params") for prompt in batch):
        raise InvalidRequestError("prompt: only generate takes prompts that are more than tokens.", "prompt")
    adapter = {} if lora_request is None else wanted("engine", "adapter_of", "an adapter")(llm, lora_request)
    settings = msgspec.structs.replace(params.prompt_params(), **adapter)
    requests = [llm.input_processor.process_inputs(llm.next_id(), prompt, settings) for prompt in batch]
    searches = [BeamSearch(request, params, llm.vllm_config.shape.vocab_size) for request in requests]
    while open_searches := [beams for beams in searches if not beams.done]:
        steps = [beams.step_requests() for beams in open_searches]
        asked = list(itertools.chain(*steps))
        outputs = llm.run_all(asked, [request.prompt_token_ids for request in asked])
        answers = {output.request_id: candidates_of(output) for output in outputs}
        for beams, step in zip(open_searches, steps):
            beams.advance([answers[request.request_id] for request in step])
    texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
    return [beams.output(text, llm.tokenizer) for beams, text in zip(searches, texts)]


Generate = Callable[[EngineCoreRequest], AsyncGenerator[RequestOutput, None]]


async def run_search(search: BeamSearch, generate: Generate) -> None:
    """Drive one search to its end, all beams of a step at once. When it is cancelled, nothing goes on in the engine."""

    async def ask(request: EngineCoreRequest) -> TokenLogprobs:
        async for output in generate(request):
            last = output
        return candidates_of(last)

    while not search.done:
        tasks = [asyncio.create_task(ask(request)) for request in search.step_requests()]
        try:
            search.advance(await asyncio.gather(*tasks))
        except BaseException:  # its client left, or the engine is dead
            search.trace_end("abort")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
