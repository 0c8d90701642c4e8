"""What stands where a tokenizer would (vllm/config/model.py, `skip_tokenizer_init`)."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import NoReturn

from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputHook
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.sampling_params import SamplingParams

NEED_TEXT = ("stop", "bad_words", "structured_outputs")
"""Fields of SamplingParams whose meaning is text."""


class NoText:
    """The text of tokens that follow others: none."""

    def push(self, token: str, raw: bytes) -> str:
        """See TokenStream."""
        return ""


class NoTokenizer(Tokenizer):
    """Knows the size of the vocabulary and the ids that end a text, as config.json has them. Refuses to make tokens of text, or text of tokens."""

    makes_text = False

    def __init__(self, config: VllmConfig) -> None:
        shape = config.shape
        self.vocab_size, self.eos_token_id, self.more_eos_token_ids = (
            shape.vocab_size,
            shape.eos_token_id,
            shape.more_eos_token_ids,
        )
        self.chat_template, self.max_token_bytes = None, sys.maxsize
        self.eos_token = self.bos_token = ""
        self.piece = lru_cache(1)(lambda token_id: ("", b""))

    @property
    def backend(self) -> NoReturn:  # type: ignore[override]
        """Raises InvalidRequestError: whoever asks for the library's tokenizer needs one."""
        _refuse("this needs one", None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError."""
        _refuse("send the prompt as token ids", "prompt")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Raises InvalidRequestError."""
        _refuse("it has no text for token ids", None)

    def stream(self, after: list[int], skip_special_tokens: bool = True) -> NoText:
        """Tokens without a text."""
        return NoText()

    def is_special(self, token_id: int) -> bool:
        """Nobody knows."""
        return False

    def special_tokens(self) -> dict[str, int]:
        """Nobody knows any."""
        return {}

    def token_bytes(self, token_id: int) -> bytes:
        """Nobody knows them."""
        return b""

    def token(self, token_id: int) -> str:
        """Nobody knows it."""
        return ""

    def token_text(self, token_id: int) -> str:
        """Its id, as `return_tokens_as_token_ids` shows tokens in logprobs."""
        return f"token_id:{token_id}"


class WithoutTextHook(InputHook):
    """Called for every request."""

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Raises InvalidRequestError for a field whose meaning is text: ignoring it would change the answer."""
        for field in NEED_TEXT:
            if getattr(params, field, None):
                _refuse("leave out what is made of text", field)
        return params


def _refuse(what_to_do: str, field: str | None) -> NoReturn:
    raise InvalidRequestError(f"This engine has no tokenizer (--skip-tokenizer-init): {what_to_do}.", field)
