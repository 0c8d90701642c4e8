"""POST /v1/chat/completions (vllm/entrypoints/openai/serving_chat.py, OpenAIServingChat)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator

from starlette.requests import Request

from stage02_server.batch import Batch
from stage02_server.chat_template import ChatTemplate
from stage02_server.cli_args import FrontendArgs
from stage02_server.protocol import ChatCompletionRequest
from stage02_server.protocol_response import (
    ChatChoice,
    ChatCompletionResponse,
    ChatLogProb,
    ChatLogProbs,
    ChatMessage,
    ChatStreamChoice,
    ChatStreamResponse,
    TokenLogProb,
    UsageInfo,
)
from stage02_server.serving_engine import OpenAIServing, finite, prompt_logprobs_json, run_until_disconnect, token_name
from stage02_server.serving_models import OpenAIServingModels
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace


def _logprobs(positions: list[TokenLogprobs] | None, tokenizer: Tokenizer, as_ids: bool) -> ChatLogProbs | None:
    """OpenAI's chat shape. A position holds the sampled token first, then the most likely ones."""
    if positions is None:
        return None

    def shown(token_id: int, logprob: float) -> dict:
        text, raw = token_name(tokenizer, token_id, as_ids), tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    content = []
    for position in positions:
        (sampled, *top) = zip(position.token_ids, position.logprobs, strict=True)
        content.append(ChatLogProb(**shown(*sampled), top_logprobs=[TokenLogProb(**shown(*pair)) for pair in top]))
    return ChatLogProbs(content=content)


class ChatChunks:
    """Engine outputs as chunks of a chat stream. The first chunk of each answer says who speaks."""

    def __init__(self, batch: Batch, tokenizer: Tokenizer, role: str) -> None:
        self._batch, self._tokenizer, self._role = batch, tokenizer, role
        self._created = int(time.time())
        self._begun: set[int] = set()

    def _chunk(self, choices: list[ChatStreamChoice], usage: UsageInfo | None = None) -> ChatStreamResponse:
        return ChatStreamResponse(
            id=self._batch.ids.response, created=self._created, model=self._batch.model, choices=choices, usage=usage
        )

    def chunks(self, index: int, output: CompletionOutput) -> Iterator[ChatStreamResponse]:
        """One chunk, and before it the role if this is the answer's first."""
        if index not in self._begun:
            self._begun.add(index)
            begin = self._chunk([ChatStreamChoice(index=index, delta={"role": self._role, "content": ""})])
            begin.prompt_token_ids = self._batch.shown_prompt_ids(index)
            yield begin
        choice = ChatStreamChoice(
            index=index,
            delta={"content": output.text},
            logprobs=_logprobs(output.logprobs, self._tokenizer, self._batch.tokens_as_ids),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._batch.return_token_ids else None,
        )
        yield self._chunk([choice])

    def usage_chunk(self, usage: UsageInfo) -> ChatStreamResponse:
        """The last one."""
        return self._chunk([], usage)


class OpenAIServingChat(OpenAIServing):
    """Answers chats."""

    def __init__(
        self, engine_client: AsyncLLM, models: OpenAIServingModels, template: ChatTemplate, args: FrontendArgs
    ) -> None:
        super().__init__(engine_client, models, args)
        self._template, self._role = template, args.response_role

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | AsyncGenerator[bytes, None]:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        ids, model = self.ids(request, raw_request), self.check(request)
        if trace.on:
            trace.emit("request.validated", req=ids.engine_id(0), model=model, stream=bool(request.stream), prompts=1)
        prompt = self._template.apply(request.messages)
        if trace.on:
            count = len(request.messages)
            trace.emit("request.templated", req=ids.engine_id(0), messages=count, characters=len(prompt))
        special = self._template.adds_special_tokens(request.add_special_tokens)
        batch = self.make_batch(request, [prompt], request.to_sampling_params(), ids, model, special)
        if request.stream:
            maker = ChatChunks(batch, self.engine_client.tokenizer, self._role)
            return await self.begin_stream(request, batch, maker, raw_request.receive)
        return await run_until_disconnect(raw_request.receive, self._whole(batch))

    async def _whole(self, batch: Batch) -> ChatCompletionResponse:
        created = int(time.time())
        (output,) = await self.full(batch)
        return ChatCompletionResponse(
            id=batch.ids.response,
            created=created,
            model=batch.model,
            choices=[self._choice(batch, answer) for answer in output.outputs],
            usage=batch.usage([len(answer.token_ids) for answer in output.outputs]),
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs, self.engine_client.tokenizer),
            prompt_token_ids=batch.shown_prompt_ids(0),
        )

    def _choice(self, batch: Batch, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=ChatMessage(role=self._role, content=output.text),
            logprobs=_logprobs(output.logprobs, self.engine_client.tokenizer, batch.tokens_as_ids),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if batch.return_token_ids else None,
        )
