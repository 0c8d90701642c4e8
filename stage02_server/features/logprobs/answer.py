"""Logprobs in OpenAI's shapes.

Source: vllm/entrypoints/openai/completion/serving.py (_create_completion_logprobs),
vllm/entrypoints/openai/chat_completion/serving.py (_create_chat_logprobs).
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any

from stage02_server.features.logprobs.chances import Chances
from stage02_server.features.logprobs.fields import ChatLogProb, ChatLogProbs, CompletionLogProbs, TokenLogProb
from stage02_server.features.logprobs.token_texts import MAX_KNOWN, TokenTexts
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stage03_engine.outputs import CompletionOutput

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's number


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def shown_id(token_id: int) -> str:
    """A token's name in logprobs with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


@lru_cache(MAX_KNOWN)
def bytes_of(text: str) -> list[int]:
    """A text in UTF-8; not to be changed."""
    return list(text.encode())


def add_token(
    result: CompletionLogProbs, texts: dict[int, str], position: TokenLogprobs, num_top: int, offset: int, as_ids: bool
) -> None:
    """Add the chosen token of a position, and `num_top` others in its place. `texts` are those of its tokens; `offset` says
    where it begins, in characters. Of several tokens with one text, such as parts of characters, the last one counts."""
    result.text_offset.append(offset)
    names = {token_id: shown_id(token_id) for token_id in texts} if as_ids else texts
    result.tokens.append(names[position.token_ids[0]])
    result.token_logprobs.append(finite(position.logprobs[0]))
    logprobs = dict(zip(position.token_ids[: 1 + num_top], position.logprobs))
    result.top_logprobs.append({names[token_id]: finite(logprob) for token_id, logprob in logprobs.items()})


def check_number(requests: EngineRequests, most: int) -> None:
    """Raises InvalidRequestError if the answers could hold more log-probabilities than `most`. One answer may have all of its own."""
    params = [made.sampling_params for made in requests.engine_requests]
    if len(params) * params[0].num_answers == 1:
        return
    count = sum(
        each.num_answers * (each.max_tokens or 0) * (1 + (each.num_logprobs or 0))
        for each in params
        if each.logprobs is not None
    )
    of_prompts = zip(requests.engine_requests, (each.prompt_logprobs for each in params), strict=True)
    count += sum(len(made.prompt_token_ids) * (1 + likely) for made, likely in of_prompts if likely is not None)
    if count > most:
        field = "prompt_logprobs" if params[0].logprobs is None else "logprobs"
        reason = f"the answers could hold {count} log-probabilities, and the limit is {most} (--max-request-logprobs)"
        raise InvalidRequestError(
            f"{field}: {reason}; ask for fewer, a smaller max_tokens, or fewer answers at once.", field
        )


class LogprobsWriter:
    """The logprobs of one answer, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, requests: EngineRequests, index: int, as_ids: bool) -> None:
        params = requests.engine_requests[index // requests.n].sampling_params
        self._as_ids, self._num_top = as_ids, params.num_logprobs or 0
        self._texts = TokenTexts(tokenizer)
        self._given = 0  # characters of the answer's text

    def write(self, positions: list[TokenLogprobs], text: str) -> CompletionLogProbs:
        """The next tokens, which come with `text`.

        As in vLLM the first of them begins where the text so far ends, and each other one after the names of those before it: names
        of parts of characters are empty until the last part, and "token_id:5" is as long as it reads.
        """
        result, offset = CompletionLogProbs(), self._given
        for position in positions:
            add_token(result, self._texts.at(position), position, self._num_top, offset, self._as_ids)
            offset += len(result.tokens[-1])
        self._given += len(text)
        return result


class ChatLogprobsWriter:
    """The same in the form of chats: an entry per position. `all_tokens`: the chosen token stands first among the others.

    As in vLLM `bytes` are those of the text that is told, so that the bytes of an answer's tokens add up to its text: a part of a
    character has none, and the last part has all. With `as_ids` only the chosen token keeps those of its text.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False, all_tokens: bool = False) -> None:
        self._as_ids, self._all_tokens = as_ids, all_tokens
        self._texts = TokenTexts(tokenizer)

    def write(self, positions: list[TokenLogprobs]) -> list[ChatLogProb]:
        """The next tokens."""
        return [self._entry(position) for position in positions]

    def _entry(self, position: TokenLogprobs) -> ChatLogProb:
        texts = self._texts.at(position)
        names = {token_id: shown_id(token_id) for token_id in texts} if self._as_ids else texts
        pairs = list(zip(position.token_ids, map(finite, position.logprobs), strict=True))
        likely = list(dict(pairs).items()) if self._all_tokens else pairs[1:]
        top = [TokenLogProb(names[token_id], logprob, bytes_of(names[token_id])) for token_id, logprob in likely]
        token_id, logprob = pairs[0]
        return ChatLogProb(names[token_id], logprob, bytes_of(texts[token_id]), top)


class CompletionLogprobsHook(AnswerHook):
    """Each choice has those of its tokens."""

    def __init__(self, requests: EngineRequests, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._requests, self._tokenizer, self._as_ids = requests, tokenizer, as_ids
        self._writers: dict[int, LogprobsWriter] = {}
        self._chances = Chances(requests, tokenizer)

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """What `output` adds."""
        if output.logprobs is not None:
            self._chances.tell(index, output.logprobs)
            if index not in self._writers:
                self._writers[index] = LogprobsWriter(self._tokenizer, self._requests, index, self._as_ids)
            choice.logprobs = self._writers[index].write(output.logprobs, output.text)


class ChatLogprobsHook(AnswerHook):
    """The same in the form of chats."""

    def __init__(self, requests: EngineRequests, tokenizer: Tokenizer, as_ids: bool) -> None:
        named = requests.engine_requests[0].sampling_params.logprob_token_ids is not None
        self._writers: dict[int, ChatLogprobsWriter] = defaultdict(lambda: ChatLogprobsWriter(tokenizer, as_ids, named))
        self._chances = Chances(requests, tokenizer)

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """What `output` adds."""
        if output.logprobs is not None:
            self._chances.tell(index, output.logprobs)
            choice.logprobs = ChatLogProbs(content=self._writers[index].write(output.logprobs))
