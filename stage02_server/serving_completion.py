"""POST /v1/completions (vllm/entrypoints/openai/serving_completion.py, OpenAIServingCompletion)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from starlette.requests import Request

from stage02_server.protocol import CompletionRequest
from stage02_server.protocol_response import CompletionChoice, CompletionResponse
from stage02_server.serving_engine import AnswerMaker, OpenAIServing
from stage03_engine.outputs import CompletionOutput


class CompletionMaker(AnswerMaker):
    """Engine outputs as choices of a completion: a chunk of the stream looks like the whole answer."""

    whole_class = chunk_class = CompletionResponse

    def choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        """What `output` adds to answer `index`."""
        reason = output.finish_reason
        choice = CompletionChoice(index=index, text=output.text, finish_reason=reason, stop_reason=output.stop_reason)
        self.add_features(index, choice, output)
        return choice

    def pieces(self, index: int, output: CompletionOutput) -> Iterator[CompletionChoice]:
        """One chunk."""
        yield self.choice(index, output)


class OpenAIServingCompletion(OpenAIServing):
    """Continues texts."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | AsyncGenerator[bytes, None]:
        """The whole answer, or its stream. Raises every refusal before a stream begins."""
        ids, model = self.ids(request, raw_request), self.check(request)
        prompts, receive = request.prompts(), raw_request.receive
        self.trace_validated(request, ids, model, len(prompts))
        params, special = request.to_sampling_params(self.defaults), request.add_special_tokens
        requests = await self.make_requests(request, prompts, params, ids, model, receive, special)
        return await self.answer(request, CompletionMaker(requests), receive)
