"""The flags of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option
from stage03_engine.errors import ConfigError


@dataclass(frozen=True)
class LogprobsFlags:
    """How answers call tokens, and how many log-probabilities they hold."""

    return_tokens_as_token_ids: bool = option(
        False, 'in logprobs call tokens "token_id:5" instead of by their text, unless a request says otherwise'
    )
    max_request_logprobs: int = option(
        2097152,
        "most log-probabilities that a request may ask for, over all its prompts and answers (400 beyond); a single answer to a single "
        "prompt may have all of its own",
    )

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        if self.max_request_logprobs < 1:
            raise ConfigError(f"max_request_logprobs must be at least 1, not {self.max_request_logprobs}")
