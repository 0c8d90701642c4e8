"""POST /v1/completions (vllm/entrypoints/openai/completion/serving.py, OpenAIServingCompletion)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from stage02_server.protocol import CompletionRequest
from stage02_server.protocol_response import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionResponse,
)
from stage02_server.serving_engine import AnswerMaker, OpenAIServing, Result
from stage03_engine.outputs import CompletionOutput


class CompletionMaker(AnswerMaker):
    """Engine outputs as choices of a completion: a chunk of the stream looks like the whole answer."""

    whole_class = last_class = CompletionResponse
    chunk_class = CompletionChunk

    def choice(self, index: int, output: CompletionOutput, kind: Any = CompletionChoice) -> Any:
        """What `output` adds to answer `index`."""
        reason, stop = output.finish_reason, output.stop_reason
        choice = kind(index=index, text=output.text, finish_reason=reason, stop_reason=stop)
        if self.requests.hooks:
            self.add_features(index, choice, output)
        return choice

    def pieces(self, index: int, output: CompletionOutput) -> list[Any]:
        """One chunk."""
        return [self.choice(index, output, CompletionChunkChoice)]


class OpenAIServingCompletion(OpenAIServing):
    """Continues texts."""

    async def create_completion(self, request: CompletionRequest, raw_request: Request) -> Result:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        ids, model, receive = self.ids(request, raw_request), self.check(request), raw_request.receive
        prompts = request.prompts()
        self.trace_validated(request, ids, model, len(prompts))
        params, special = request.to_sampling_params(self.defaults), request.add_special_tokens
        requests = await self.tokenize(request, prompts, params, ids, model, receive, special)
        outputs = self.ask(request, requests)
        return await self.answer(request, CompletionMaker(requests), outputs, raw_request)
