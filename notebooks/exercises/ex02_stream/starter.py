"""From tokens to a stream: bytes become characters, characters become text that may be sent, text becomes events.

Write the five parts in the order in which they stand here: a later one calls the earlier ones.
"""

from __future__ import annotations

from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.sampling_params import SamplingParams


def server_sent_event(data: bytes) -> bytes:
    """One event of a `text/event-stream`: `data: `, the payload, and two line breaks (`\\n`). The payload has no line break."""
    raise NotImplementedError


class ByteLevelStream:
    """The bytes of one token after the other go in, characters come out.

    Bytes that do not form a whole character yet wait inside, until the next token brings the rest. Bytes that can never become
    valid UTF-8, whatever follows, come out as U+FFFD at once: as `bytes.decode("utf-8", errors="replace")` writes them.
    """

    def __init__(self) -> None:
        raise NotImplementedError

    def push(self, token: str, raw: bytes) -> str:
        """The text that `raw`, the bytes of a token, adds; perhaps none. (`token` is for other kinds of tokenizers: leave it.)"""
        raise NotImplementedError


def find_stop(text: str, stops: list[str], start: int) -> tuple[int, str] | None:
    """The stop string that appears first in `text` at or after the position `start`, as (its position, the stop string).

    Of several that begin at the same position, the longest. None if there is none.
    """
    raise NotImplementedError


def held_back(text: str, stops: list[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string, and so must wait; 0 if none could.

    No stop string is in `text` as a whole.
    """
    raise NotImplementedError


class IncrementalDetokenizer:
    """The growing text of one answer.

    text         what the tokens say so far
    safe         text[:safe] may be sent: it holds no stop string, and no beginning of one that could still become whole
    num_tokens   tokens of the answer so far
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int] | None = None) -> None:
        """Given."""
        self._tokenizer = tokenizer  # .is_special(token_id), and .piece(token_id): what the push() of a stream takes
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._skip_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._stream = tokenizer.stream(prompt_token_ids or [], params.skip_special_tokens)  # a ByteLevelStream
        self._searched = 0  # no stop string that counts begins before this position of the text; for you to move on
        self._given = 0  # characters that next_text() has returned; for you to keep
        self.num_tokens = 0
        self.text = ""
        self.safe = 0

    def update(self, new_token_ids: list[int], finished_by_token: bool = False) -> str | None:
        """Take in tokens; returns the stop string that appeared, or None.

        One token after the other: count it, and add its text, `self._stream.push(*self._tokenizer.piece(token_id))`. A
        special token (`is_special`) counts, but is not pushed if `_skip_special` is set.

        After each token look for a stop string that begins at or after `_searched`. If there is one, the text ends before it, or
        behind it if `_include_stop` is set; all of it is safe; the tokens that are left are neither counted nor added.
        A stop string that begins in the text of the first `_min_tokens` tokens does not count, wherever it ends.

        `finished_by_token`: the last of these tokens ended the answer (end of text, or a stop token). It is neither counted nor
        added, unless `_include_stop` is set: then it is a token like all others.

        When update() returns None, everything is safe but for what `held_back` names; text in which no stop string may begin
        need not wait.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """No more tokens will come: what was held back is safe now. (Half a character is not text, and is dropped.)"""
        raise NotImplementedError

    def next_text(self, delta: bool) -> str:
        """The text that may be sent: all that is safe, or with `delta` only what no earlier call, of
        either kind, has returned."""
        raise NotImplementedError
