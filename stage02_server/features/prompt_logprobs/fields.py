"""The request field `prompt_logprobs`: the log-probabilities of the prompt's tokens, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from stage02_server.protocol_types import AnswerHook, Int32, RequestFields
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing


@dataclass(slots=True)  # an answer may hold a million of them; a model takes eight times the memory
class PromptLogprob:
    """A token that stands at a place of the prompt, or could have: `rank` 1 is the most likely one there."""

    logprob: Annotated[float, Field(description="Its log-probability.")]
    rank: Annotated[int, Field(description="Its place among all tokens; 1 is the likeliest.")]
    decoded_token: Annotated[str, Field(description="The text of the token.")]


class PromptLogprobsOfAnswer(BaseModel):
    """Of a choice of a completion, and of the answer to a chat."""

    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = Field(
        default=None, description="The log-probabilities of the prompt's tokens, by token id; null for the first."
    )


class PromptLogprobsFields(RequestFields):
    """Not in a stream."""

    prompt_logprobs: Int32 | None = Field(default=None, description="The same for the tokens of the prompt.")

    def apply(self, params: dict[str, Any]) -> None:
        """Raises InvalidRequestError in a stream."""
        if self.prompt_logprobs is None:
            return
        if getattr(self, "stream", False):
            raise InvalidRequestError("prompt_logprobs cannot be given in a stream.", "prompt_logprobs")
        params["prompt_logprobs"] = self.prompt_logprobs

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts them into the response."""
        if self.prompt_logprobs is None:
            return None
        from stage02_server.features.logprobs.answer import check_number
        from stage02_server.features.prompt_logprobs.answer import PromptLogprobsHook

        check_number(requests, serving.args.max_request_logprobs)
        return PromptLogprobsHook(requests, serving.engine_client.tokenizer, self.prompt_logprobs)
