"""Logprobs in OpenAI's shapes.

Source: vllm/entrypoints/openai/serving_completion.py (_create_completion_logprobs), serving_chat.py (_create_chat_logprobs).
"""

from __future__ import annotations

from typing import Any

from stage02_server.features.logprobs.fields import ChatLogProb, ChatLogProbs, CompletionLogProbs, TokenLogProb
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's number


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """A token's name in logprobs: its text, or with `return_tokens_as_token_ids` "token_id:5"."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def spelled(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """The token as the vocabulary writes it, and its bytes."""
    return tokenizer.token(token_id), tokenizer.token_bytes(token_id)


def add_token(
    result: CompletionLogProbs,
    tokenizer: Tokenizer,
    token_id: int,
    position: TokenLogprobs | None,
    num_top: int,
    offset: int,
    as_ids: bool,
) -> None:
    """Add one token, and `num_top` others in its place. `position` is None for the first token of a prompt, which nothing
    predicts; `offset` counts characters."""
    result.text_offset.append(offset)
    result.tokens.append(token_name(tokenizer, token_id, as_ids))
    if position is None:
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
        return
    result.token_logprobs.append(finite(position.logprobs[0]))
    top: dict[str, float] = {}
    for likely, logprob in zip(position.token_ids[: 1 + num_top], position.logprobs):
        top.setdefault(token_name(tokenizer, likely, as_ids), finite(logprob))  # parts of characters may look alike
    result.top_logprobs.append(top)


class LogprobsWriter:
    """The logprobs of one answer, piece by piece. Remembers how many characters the tokens so far amount to; a token that
    begins inside a character has the offset of that character, and one that the text does not show takes no room."""

    def __init__(self, tokenizer: Tokenizer, requests: EngineRequests, index: int, as_ids: bool) -> None:
        request = requests.engine_requests[index // requests.n]
        params = request.sampling_params
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._num_top, self._skip_special = params.num_logprobs or 0, params.skip_special_tokens
        self._stream = tokenizer.stream(request.prompt_token_ids, self._skip_special)
        self._offset = 0

    def write(self, positions: list[TokenLogprobs]) -> CompletionLogProbs:
        """The next tokens."""
        result = CompletionLogProbs()
        for position in positions:
            token_id = position.token_ids[0]
            add_token(result, self._tokenizer, token_id, position, self._num_top, self._offset, self._as_ids)
            if not (self._skip_special and self._tokenizer.is_special(token_id)):
                self._offset += len(self._stream.push(*spelled(self._tokenizer, token_id)))
        return result


def chat_logprobs(positions: list[TokenLogprobs], tokenizer: Tokenizer, as_ids: bool = False) -> list[ChatLogProb]:
    """An entry per position, which holds the sampled token first, then the others. `as_ids`: tokens read "token_id:5"."""

    def shown(token_id: int, logprob: float) -> TokenLogProb:
        text, raw = token_name(tokenizer, token_id, as_ids), tokenizer.token_bytes(token_id)
        return TokenLogProb(token=text, logprob=finite(logprob), bytes=list(raw))

    content = []
    for position in positions:
        sampled, *top = [shown(*pair) for pair in zip(position.token_ids, position.logprobs, strict=True)]
        content.append(ChatLogProb(**sampled.model_dump(), top_logprobs=top))
    return content


class CompletionLogprobsHook(AnswerHook):
    """Each choice has those of its tokens."""

    def __init__(self, requests: EngineRequests, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._requests, self._tokenizer, self._as_ids = requests, tokenizer, as_ids
        self._writers: dict[int, LogprobsWriter] = {}

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """What `output` adds."""
        if output.logprobs is not None:
            if index not in self._writers:
                self._writers[index] = LogprobsWriter(self._tokenizer, self._requests, index, self._as_ids)
            choice.logprobs = self._writers[index].write(output.logprobs)


class ChatLogprobsHook(AnswerHook):
    """The same in the form of chats."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """What `output` adds."""
        if output.logprobs is not None:
            choice.logprobs = ChatLogProbs(content=chat_logprobs(output.logprobs, self._tokenizer, self._as_ids))
