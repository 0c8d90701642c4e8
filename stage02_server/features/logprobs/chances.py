"""What a recording is told of log-probabilities: each token of an answer with the likeliest ones in its place. The player shows it."""

from __future__ import annotations

import math
from collections import defaultdict

from stage02_server.features.logprobs.token_texts import TokenTexts
from stage02_server.serving_engine import EngineRequests
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs
from stagetrace import trace

MOST = 5  # candidates of a token: a picture has no room for 20, and a line of the trace should stay short
DIGITS = 5  # of a probability, behind the point


class Chances:
    """Of the answers to one HTTP request; it holds nothing unless something is told."""

    def __init__(self, requests: EngineRequests, tokenizer: Tokenizer) -> None:
        self._requests = requests
        self._texts: dict[int, TokenTexts] = defaultdict(lambda: TokenTexts(tokenizer))
        self._told: dict[int, int] = defaultdict(int)  # tokens of each answer

    def tell(self, index: int, positions: list[TokenLogprobs]) -> None:
        """Record the next tokens of the answer with this index, if anything is recorded.

        Texts only with --trace-prompts, as everywhere, and no probabilities without: whoever has the model finds the text that they are of.
        """
        if trace.on:
            texts = self._texts[index]
            chances = [self._chances(texts, position) for position in positions] if trace.prompts else []
            first, self._told[index] = self._told[index], self._told[index] + len(positions)
            trace.emit(
                "answer.logprobs", req=self._request_id(index), first=first, num_tokens=len(positions), chances=chances
            )

    def _chances(self, texts: TokenTexts, position: TokenLogprobs) -> list[list[str | float]]:
        """[text, probability] of the chosen token and of up to MOST likely ones, of which it may be one; an equal id is an equal row."""
        names = texts.at(position)
        pairs = zip(position.token_ids[: 1 + MOST], position.logprobs)
        return [[names[token_id], round(math.exp(logprob), DIGITS)] for token_id, logprob in pairs]

    def _request_id(self, index: int) -> str:
        """The engine core's request that gave this answer; the caller's where the answers were chosen among more."""
        made = self._requests.engine_requests[index // self._requests.n]
        answers = made.sampling_params.num_answers
        several = answers > 1 and answers == self._requests.n
        return f"{index % answers}_{made.request_id}" if several else made.request_id
