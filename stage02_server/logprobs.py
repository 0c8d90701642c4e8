"""Logprobs in OpenAI's shape for completions, and the prompt as the beginning of an answer (`echo`).

Source: vllm/entrypoints/openai/serving_completion.py (_create_completion_logprobs).
"""

from __future__ import annotations

from dataclasses import dataclass

from stage02_server.protocol_response import ChatLogProb, CompletionLogProbs, PromptLogprob, TokenLogProb
from stage02_server.serving_engine import EngineRequests
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's number


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """How logprobs call a token: its text, or with `return_tokens_as_token_ids` "token_id:5"."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def prompt_logprobs_json(entries: list[TokenLogprobs | None] | None, tokenizer: Tokenizer) -> PromptLogprobs | None:
    """vLLM's shape: for each prompt token the tokens that could have stood there, by id; None for the first."""
    if entries is None:
        return None
    result: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranks = [entry.sampled_rank, *range(1, len(entry.token_ids))]
        position: dict[int, PromptLogprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            text = tokenizer.token_text(token_id)
            position.setdefault(token_id, PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text))
        result.append(position)
    return result


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with. `logprobs` as in `RequestOutput.prompt_logprobs`; empty if nobody asked."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def most_likely(entries: list[TokenLogprobs | None] | None, k: int | None) -> list[TokenLogprobs | None] | None:
    """Of each position the token itself and the `k` most likely ones: `echo` may have asked the engine for more. With k
    None nobody asked."""
    if entries is None or k is None:
        return None
    return [e and TokenLogprobs(e.token_ids[: 1 + k], e.logprobs[: 1 + k], e.sampled_rank) for e in entries]


class LogprobsWriter:
    """The logprobs of one answer, piece by piece. Remembers how many characters the tokens so far amount to; a token that
    begins inside a character has the offset of that character, and one that the text does not show takes no room."""

    def __init__(self, tokenizer: Tokenizer, batch: EngineRequests, index: int) -> None:
        request = batch.requests[index // batch.n]
        self._tokenizer, self._as_ids = tokenizer, batch.tokens_as_ids
        self._num_likely = request.sampling_params.logprobs or 0  # of a prompt
        self._num_shown = request.sampling_params.num_logprobs or 0
        self._skip_special = request.sampling_params.skip_special_tokens
        self._stream = tokenizer.stream(request.prompt_token_ids, self._skip_special)
        self._offset = 0

    def write(self, positions: list[TokenLogprobs] | None, echo: Echo | None = None) -> CompletionLogProbs | None:
        """The next tokens, and those of the prompt before the first; None when logprobs were not asked for."""
        if positions is None:
            return None
        result = CompletionLogProbs()
        if echo is not None:
            self._write_prompt(result, echo)
        for position in positions:
            token_id = position.token_ids[0]
            self._add(result, token_id, position, self._num_shown)
            if not (self._skip_special and self._tokenizer.is_special(token_id)):
                self._offset += len(self._stream.push(*self._spelled(token_id)))
        return result

    def _write_prompt(self, result: CompletionLogProbs, echo: Echo) -> None:
        """A special token is a part of the prompt's text if the client wrote it, and not if the tokenizer added it."""
        stream = self._tokenizer.stream([])
        for token_id, position in zip(echo.token_ids, echo.logprobs, strict=True):
            self._add(result, token_id, position, self._num_likely)
            hidden = self._tokenizer.is_special(token_id)
            if not hidden or echo.text.startswith(self._tokenizer.token_text(token_id), self._offset):
                self._offset += len(stream.push(*self._spelled(token_id)))
        self._offset = len(echo.text)

    def _spelled(self, token_id: int) -> tuple[str, bytes]:
        return self._tokenizer.token(token_id), self._tokenizer.token_bytes(token_id)

    def _add(self, result: CompletionLogProbs, token_id: int, position: TokenLogprobs | None, num_top: int) -> None:
        """One token, and `num_top` others in its place; `position` is None for the first of a prompt, which nothing predicts."""
        result.text_offset.append(self._offset)
        result.tokens.append(token_name(self._tokenizer, token_id, self._as_ids))
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            return
        result.token_logprobs.append(finite(position.logprobs[0]))
        top: dict[str, float] = {}
        for likely, logprob in zip(position.token_ids[: 1 + num_top], position.logprobs):
            name = token_name(self._tokenizer, likely, self._as_ids)
            top.setdefault(name, finite(logprob))  # two halves of characters may look alike
        result.top_logprobs.append(top)


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
