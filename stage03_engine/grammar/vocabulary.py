"""The tokens of a model as bytes, for grammars. Outside `core`, since the tokenizer belongs to the front end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


class Vocabulary:
    """The tokens of a model in the form that llguidance asks for (its `TokenizerWrapper`)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int | None) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = len(self.tokens) if eos_token_id is None else eos_token_id
        if eos_token_id is None:  # it wants one: an id that no model can sample
            self.tokens.append(b"")
        self.tokens[self.eos_token_id] = b"<|endoftext|>"
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """Would split forced text into its usual tokens; our grammars force none."""
        raise NotImplementedError


def read_vocabulary(config: VllmConfig) -> Vocabulary:
    """The model's vocabulary. Special tokens and padding ids have no text, so no grammar can ask for them."""
    from stage03_engine.frontend.tokenizer import (
        init_tokenizer_from_configs,  # the process that checks grammars does without
    )

    tokenizer, size = init_tokenizer_from_configs(config), config.shape.vocab_size
    tokens = [
        b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(min(size, tokenizer.vocab_size))
    ]
    eos = tokenizer.eos_token_id
    return Vocabulary(tokens + [b""] * (size - len(tokens)), None if eos is None or eos >= size else eos)
