"""POST /v1/completions (vllm/entrypoints/openai/serving_completion.py, OpenAIServingCompletion)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator

from starlette.requests import Request

from stage02_server.logprobs import LogprobsWriter
from stage02_server.protocol import CompletionRequest
from stage02_server.protocol_response import CompletionChoice, CompletionResponse, UsageInfo
from stage02_server.serving_engine import EngineRequests, OpenAIServing
from stage02_server.streaming import run_until_disconnect
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


class CompletionChunks:
    """Engine outputs as chunks of a completion stream, and as choices of a whole answer."""

    def __init__(self, requests: EngineRequests, tokenizer: Tokenizer) -> None:
        self._requests, self._tokenizer = requests, tokenizer
        self._created = int(time.time())
        self._begun: set[int] = set()  # answers
        self._writers: dict[int, LogprobsWriter] = {}

    def choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        """What `output` adds to answer `index`."""
        requests, first = self._requests, index not in self._begun
        self._begun.add(index)
        choice = CompletionChoice(
            index=index,
            text=output.text,
            logprobs=None if output.logprobs is None else self._writer(index).write(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if requests.return_token_ids else None,
            prompt_token_ids=requests.shown_prompt_ids(index) if first else None,
        )
        for hook in requests.hooks:
            hook.choice(index, choice, first)
        return choice

    def _writer(self, index: int) -> LogprobsWriter:
        if index not in self._writers:
            self._writers[index] = LogprobsWriter(self._tokenizer, self._requests, index)
        return self._writers[index]

    def response(self, choices: list[CompletionChoice], usage: UsageInfo | None = None) -> CompletionResponse:
        """A chunk, or the whole answer."""
        return CompletionResponse(
            id=self._requests.ids.response,
            created=self._created,
            model=self._requests.model,
            choices=choices,
            usage=usage,
        )

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[CompletionResponse]:
        """One chunk."""
        yield self.response([self.choice(index, output)])

    def usage_chunk(self, usage: UsageInfo) -> CompletionResponse:
        """The last one."""
        return self.response([], usage)


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
        params = request.to_sampling_params(self.defaults)
        requests = await self.make_requests(
            request, prompts, params, ids, model, raw_request.receive, request.add_special_tokens
        )
        maker = CompletionChunks(requests, self.engine_client.tokenizer)
        if request.stream:
            return await self.begin_stream(request, requests, maker, raw_request.receive)
        return await run_until_disconnect(raw_request.receive, self._whole(requests, maker))

    async def _whole(self, requests: EngineRequests, maker: CompletionChunks) -> CompletionResponse:
        outputs = await self.full(requests)
        choices = [
            maker.choice(prompt * requests.n + answer.index, answer)
            for prompt, output in enumerate(outputs)
            for answer in output.outputs
        ]
        num_tokens = [len(answer.token_ids) for output in outputs for answer in output.outputs]
        response = maker.response(choices, requests.usage(num_tokens))
        for hook in requests.hooks:
            hook.response(response)
        return response
