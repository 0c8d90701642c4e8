"""POST /v1/completions (vllm/entrypoints/openai/serving_completion.py, OpenAIServingCompletion)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial

from starlette.requests import Request

from stage02_server.logprobs import Echo, LogprobsWriter, most_likely, prompt_logprobs_json
from stage02_server.protocol import CompletionRequest
from stage02_server.protocol_response import CompletionChoice, CompletionResponse, UsageInfo
from stage02_server.serving_engine import EngineRequests, OpenAIServing
from stage02_server.streaming import in_thread_if_long, run_until_disconnect
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


class CompletionChoices:
    """Engine outputs as choices of the answer, or as what a chunk adds to them."""

    def __init__(self, batch: EngineRequests, tokenizer: Tokenizer, echoed: list[str] | None) -> None:
        self._batch, self._tokenizer, self._echoed = batch, tokenizer, echoed
        self._writers: dict[int, LogprobsWriter] = {}

    def choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        """What `output` adds to answer `index`; the first time with what is to be said of the prompt."""
        batch, first = self._batch, index not in self._writers
        if first:
            self._writers[index] = LogprobsWriter(self._tokenizer, batch, index)
        echo = self._echo(index // batch.n) if first else None
        return CompletionChoice(
            index=index,
            text=output.text if echo is None else echo.text + output.text,
            logprobs=self._writers[index].write(output.logprobs, echo),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if batch.return_token_ids else None,
            prompt_token_ids=batch.shown_prompt_ids(index) if first else None,
        )

    def _echo(self, prompt: int) -> Echo | None:
        if self._echoed is None:
            return None
        token_ids = self._batch.requests[prompt].prompt_token_ids
        return Echo(self._echoed[prompt], token_ids, self._batch.prompt_logprobs.get(prompt, []))


class CompletionChunks:
    """Engine outputs as chunks of a completion stream."""

    def __init__(self, batch: EngineRequests, choices: CompletionChoices) -> None:
        self._batch, self._choices = batch, choices
        self._created = int(time.time())

    def _chunk(self, choices: list[CompletionChoice], usage: UsageInfo | None = None) -> CompletionResponse:
        return CompletionResponse(
            id=self._batch.ids.response, created=self._created, model=self._batch.model, choices=choices, usage=usage
        )

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[CompletionResponse]:
        """One chunk."""
        yield self._chunk([self._choices.choice(index, output)])

    def usage_chunk(self, usage: UsageInfo) -> CompletionResponse:
        """The last one."""
        return self._chunk([], usage)


class OpenAIServingCompletion(OpenAIServing):
    """Continues texts."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | AsyncGenerator[bytes, None]:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        ids, model = self.ids(request, raw_request), self.check(request)
        prompts = request.prompts()
        if trace.on:
            trace.emit(
                "request.validated",
                req=ids.engine_id(0),
                model=model,
                stream=bool(request.stream),
                prompts=len(prompts),
            )
        batch = await self.make_batch(
            request, prompts, request.to_sampling_params(), ids, model, raw_request.receive, request.add_special_tokens
        )
        batch.prompt_only = request.prompt_only
        if trace.on and request.echo:
            trace.emit("request.echoed", req=ids.engine_id(0), logprobs=request.logprobs, prompt_only=batch.prompt_only)
        echo = partial(self._echoed, request, prompts, batch)
        echoed = await in_thread_if_long(prompts, raw_request.receive, echo)
        choices = CompletionChoices(batch, self.engine_client.tokenizer, echoed)
        if request.stream:
            return await self.begin_stream(request, batch, CompletionChunks(batch, choices), raw_request.receive)
        return await run_until_disconnect(raw_request.receive, self._whole(batch, choices, request.prompt_logprobs))

    def _echoed(
        self, request: CompletionRequest, prompts: list[str | list[int]], batch: EngineRequests
    ) -> list[str] | None:
        """With `echo` each prompt as text: as it was sent, or what its token ids stand for."""
        if not request.echo:
            return None
        sent_whole = request.truncate_prompt_tokens is None
        decode, skip = self.engine_client.tokenizer.decode, request.skip_special_tokens is not False
        return [
            prompt if isinstance(prompt, str) and sent_whole else decode(made.prompt_token_ids, skip)
            for prompt, made in zip(prompts, batch.requests, strict=True)
        ]

    async def _whole(
        self, batch: EngineRequests, choices: CompletionChoices, num_prompt_logprobs: int | None
    ) -> CompletionResponse:
        created, tokenizer = int(time.time()), self.engine_client.tokenizer
        outputs = await self.full(batch)
        made = []
        for prompt, output in enumerate(outputs):
            of_prompt = prompt_logprobs_json(most_likely(output.prompt_logprobs, num_prompt_logprobs), tokenizer)
            for answer in output.outputs:
                choice = choices.choice(prompt * batch.n + answer.index, answer)
                choice.prompt_logprobs = of_prompt
                made.append(choice)
        return CompletionResponse(
            id=batch.ids.response,
            created=created,
            model=batch.model,
            choices=made,
            usage=batch.usage([len(answer.token_ids) for output in outputs for answer in output.outputs]),
            metrics=batch.metrics(),
        )
