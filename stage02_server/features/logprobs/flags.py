"""The flag of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class LogprobsFlags:
    """How answers call tokens."""

    return_tokens_as_token_ids: bool = option(
        False, 'in logprobs call tokens "token_id:5" instead of by their text, unless a request says otherwise'
    )
