"""Incremental detokenization: token ids in, out comes text that is safe to send.

Two things make it more than `decode(ids)`. A character may be spread over several tokens, so bytes wait until they form
whole characters. A stop string may be spread over several tokens, so text that could still turn into one waits too.
Source: vllm/v1/engine/detokenizer.py (IncrementalDetokenizer, check_stop_strings).
"""

from __future__ import annotations

from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.sampling_params import SamplingParams


def find_stop(text: str, stops: list[str], start: int) -> tuple[int, str] | None:
    """The earliest stop string in `text` at or after `start`, as (position, stop string); on a tie the longest."""
    found = [(text.find(stop, start), stop) for stop in stops]
    found = [(position, stop) for position, stop in found if position >= 0]
    return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)


def held_back(text: str, stops: list[str]) -> int:
    """How many characters at the end of `text` could begin a stop string: they must not be sent yet."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0


class IncrementalDetokenizer:
    """The growing text of one request.

    `num_tokens` counts the tokens added; those after a stop string are not.
    Invariant: `text` is the decoded output so far (never with half a character at its end), and text[:safe] may be
    sent: it contains no stop string, and no beginning of one that could still complete.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._skip_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self._stream = tokenizer.stream(prompt_token_ids or [], params.skip_special_tokens)
        self._searched = 0  # no stop string begins before this position
        self._given = 0
        self.text = ""
        self.safe = 0

    def update(self, new_token_ids: list[int], finished_by_token: bool = False) -> str | None:
        """Append tokens; returns the stop string that appeared, or None. Tokens after it add no text.

        `finished_by_token` says that the last id is an end-of-text or stop token, which is not part of the text.
        """
        text_ids = new_token_ids[:-1] if finished_by_token and not self._include_stop else new_token_ids
        for token_id in text_ids:
            self.num_tokens += 1
            if self._skip_special and self._tokenizer.is_special(token_id):
                continue
            self.text += self._stream.push(*self._tokenizer.piece(token_id))
            # After each token, not after all: the text must not depend on how many tokens come at once.
            if self.num_tokens <= self._min_tokens:  # vLLM: no stop string counts in the first min_tokens tokens
                self._searched = len(self.text)
            elif self._stops and (stop := self._check_stop()) is not None:
                return stop
        if not self._stops or self.num_tokens <= self._min_tokens:
            self.safe = len(self.text)
        return None

    def _check_stop(self) -> str | None:
        hit = find_stop(self.text, self._stops, self._searched)
        if hit is not None:
            position, stop = hit
            self.text = self.text[: position + len(stop) if self._include_stop else position]
            self.safe = len(self.text)
            return stop
        self.safe = len(self.text) - held_back(self.text[self._searched :], self._stops)
        self._searched = self.safe
        return None

    def finish(self) -> None:
        """No more tokens: text held back for a stop string becomes safe; half a character is dropped."""
        self.safe = len(self.text)

    def next_text(self, delta: bool) -> str:
        """The text that may be sent: all of it, or with `delta` what was not returned before."""
        start = self._given if delta else 0
        self._given = self.safe
        return self.text[start : self.safe]
