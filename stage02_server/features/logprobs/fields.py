"""The request fields that ask for log-probabilities, and those of the answers that hold them (vllm/entrypoints/openai/completion/protocol.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from stage02_server.protocol_types import AnswerHook, Int32, RequestFields
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing


class LogprobsFields(RequestFields):
    """What completions and chats have in common."""

    return_tokens_as_token_ids: bool | None = Field(  # None: as --return-tokens-as-token-ids says
        default=None, description="In logprobs, call a token token_id:5 instead of by its text."
    )

    def tokens_as_ids(self, args: Any) -> bool:
        """True if logprobs name tokens by their ids."""
        asked = self.return_tokens_as_token_ids
        return bool(args.return_tokens_as_token_ids if asked is None else asked)


class CompletionLogprobs(LogprobsFields):
    """The form of completions."""

    logprobs: Int32 | None = Field(
        default=None,
        description="Return the log probability of each token, and of this many of the likeliest tokens in its place.",
    )

    def apply(self, params: dict[str, Any]) -> None:
        """Ask the engine for them."""
        params["logprobs"] = self.logprobs

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts them into the choices."""
        if self.logprobs is None:
            return None
        from stage02_server.features.logprobs.answer import CompletionLogprobsHook, check_number

        check_number(requests, serving.args.max_request_logprobs)
        return CompletionLogprobsHook(requests, serving.engine_client.tokenizer, self.tokens_as_ids(serving.args))


class ChatLogprobs(LogprobsFields):
    """The form of chats."""

    logprobs: bool | None = Field(default=False, description="Return the log probability of each token.")
    top_logprobs: Int32 | None = Field(
        default=None, description="With logprobs: also those of this many of the likeliest tokens."
    )

    def apply(self, params: dict[str, Any]) -> None:
        """Ask the engine for them. Raises InvalidRequestError."""
        top = checked_top_logprobs(self.top_logprobs)
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", "top_logprobs")
        params["logprobs"] = top if self.logprobs else None

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts them into the choices."""
        if not self.logprobs:
            return None
        from stage02_server.features.logprobs.answer import ChatLogprobsHook, check_number

        check_number(requests, serving.args.max_request_logprobs)
        return ChatLogprobsHook(requests, serving.engine_client.tokenizer, self.tokens_as_ids(serving.args))


def checked_top_logprobs(asked: int | None) -> int:
    """The number of likely tokens that a chat asks for. Raises InvalidRequestError."""
    from stage03_engine.sampling_params import MAX_LOGPROBS

    top = asked or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}.", "top_logprobs")
    return top


class CompletionLogProbs(BaseModel):
    """Four lists of equal length, one entry per token. `text_offset` counts characters of `tokens`, which in an answer
    of whole characters are those of its text. Nothing predicts the first token of an echoed prompt: its logprobs are None."""

    text_offset: list[int] = Field(
        default=[],
        description="Where each token begins: so many characters have the tokens before it, as they read here.",
    )
    token_logprobs: list[float | None] = Field(default=[], description="The log-probability of each token.")
    tokens: list[str] = Field(default=[], description="The tokens, as texts.")
    top_logprobs: list[dict[str, float] | None] = Field(
        default=[], description="For each token the likeliest ones in its place, with theirs."
    )


@dataclass(slots=True)  # an answer may hold a million of them; a model takes eight times the memory
class TokenLogProb:
    """A token with its log-probability. `bytes` are those of its text, which the last part of a character has alone."""

    token: Annotated[str, Field(description="The text of the token.")]
    logprob: Annotated[float, Field(description="Its log-probability.")]
    bytes: Annotated[list[int], Field(description="Its text in UTF-8.")]


@dataclass(slots=True)
class ChatLogProb(TokenLogProb):
    """The token at one position, and the most likely ones there."""

    top_logprobs: Annotated[
        list[TokenLogProb],
        Field(description="The likeliest tokens in this place, with theirs.", json_schema_extra={"default": []}),
    ] = field(default_factory=list)


class ChatLogProbs(BaseModel):
    """One entry per output token."""

    content: list[ChatLogProb] = Field(description="One entry per token of the content.")


class CompletionChoiceField(BaseModel):
    """Of a choice of a completion."""

    logprobs: CompletionLogProbs | None = Field(default=None, description="The log-probabilities that were asked for.")


class ChatChoiceField(BaseModel):
    """Of a choice of a chat."""

    logprobs: ChatLogProbs | None = Field(default=None, description="The log-probabilities that were asked for.")
