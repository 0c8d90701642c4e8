"""POST /v1/completions (vllm/entrypoints/openai/serving_completion.py, OpenAIServingCompletion)."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Iterator

from starlette.requests import Request

from stage02_server.protocol import CompletionRequest
from stage02_server.protocol_response import CompletionChoice, CompletionLogProbs, CompletionResponse, UsageInfo
from stage02_server.serving_engine import (
    Batch,
    OpenAIServing,
    PromptLogprobs,
    finite,
    prompt_logprobs_json,
    run_until_disconnect,
)
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


class LogprobsWriter:
    """The logprobs of one answer, piece by piece. Remembers how many characters the tokens so far amount to; a token that
    begins inside a character has the offset of that character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, positions: list[TokenLogprobs] | None) -> CompletionLogProbs | None:
        """The next tokens; None when logprobs were not asked for."""
        if positions is None:
            return None
        result = CompletionLogProbs()
        for position in positions:
            text = self._tokenizer.token_text
            result.text_offset.append(self._offset)
            result.tokens.append(text(position.token_ids[0]))
            result.token_logprobs.append(finite(position.logprobs[0]))
            top: dict[str, float] = {}
            for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True):
                top.setdefault(text(token_id), finite(logprob))  # two halves of characters may look alike
            result.top_logprobs.append(top)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(position.token_ids[0])))
        return result


class CompletionChunks:
    """Engine outputs as chunks of a completion stream."""

    def __init__(self, batch: Batch, tokenizer: Tokenizer) -> None:
        self._batch = batch
        self._created = int(time.time())
        self._logprobs = [LogprobsWriter(tokenizer) for _ in range(len(batch.requests) * batch.n)]

    def _chunk(self, choices: list[CompletionChoice], usage: UsageInfo | None = None) -> CompletionResponse:
        return CompletionResponse(
            id=self._batch.ids.response, created=self._created, model=self._batch.model, choices=choices, usage=usage
        )

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[CompletionResponse]:
        """One chunk."""
        yield self._chunk([_choice(index, output, self._logprobs[index])])

    def usage_chunk(self, usage: UsageInfo) -> CompletionResponse:
        """The last one."""
        return self._chunk([], usage)


def _choice(
    index: int, output: CompletionOutput, logprobs: LogprobsWriter, prompt_logprobs: PromptLogprobs | None = None
) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=output.text,
        logprobs=logprobs.write(output.logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        prompt_logprobs=prompt_logprobs,
    )


class OpenAIServingCompletion(OpenAIServing):
    """Continues texts."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | AsyncGenerator[bytes, None]:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        ids, model = raw_request.state.ids, self.check(request)
        prompts = request.prompts()
        if trace.on:
            trace.emit(
                "request.validated",
                req=ids.engine_id(0),
                model=model,
                stream=bool(request.stream),
                prompts=len(prompts),
            )
        batch = self.make_batch(request, prompts, request.to_sampling_params(), ids, model, request.add_special_tokens)
        if request.stream:
            maker = CompletionChunks(batch, self.engine_client.tokenizer)
            return await self.begin_stream(request, batch, maker, raw_request.receive)
        return await run_until_disconnect(raw_request.receive, self._whole(batch))

    async def _whole(self, batch: Batch) -> CompletionResponse:
        created, tokenizer = int(time.time()), self.engine_client.tokenizer
        outputs = await self.full(batch)
        choices = [
            _choice(
                prompt * batch.n + answer.index,
                answer,
                LogprobsWriter(tokenizer),
                prompt_logprobs_json(output.prompt_logprobs, tokenizer),
            )
            for prompt, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return CompletionResponse(
            id=batch.ids.response,
            created=created,
            model=batch.model,
            choices=choices,
            usage=batch.usage([len(answer.token_ids) for output in outputs for answer in output.outputs]),
        )
