"""The operator's flags."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option
from stage03_engine.errors import ConfigError


@dataclass(frozen=True)
class AdminFlags:
    """What operators can see and do."""

    enable_server_load_tracking: bool = option(False, "count the requests in progress for GET /load")
    server_dev_mode: bool = option(
        False, "answer GET /server_info and POST /abort_requests, which show and change what is not the caller's"
    )
    max_queue_len: int | None = option(
        None, "maximum number of waiting requests; one more is refused with 429 and Retry-After; no limit if not given"
    )
    enable_log_requests: bool = option(False, "log each prompt, with its text and its sampling parameters")
    max_log_len: int | None = option(None, "most characters and token ids of a prompt in the log; all if not given")

    def check(self) -> None:
        """Raises ConfigError for a limit below its least value."""
        if self.max_queue_len is not None and self.max_queue_len < 1:
            raise ConfigError(f"max_queue_len must be at least 1, not {self.max_queue_len}; leave it out for no limit")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"max_log_len must be at least 0, not {self.max_log_len}")
