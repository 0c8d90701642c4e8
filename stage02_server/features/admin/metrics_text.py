"""The text of `/metrics`, which no key protects and which costs more than ten times as much as `/health` (vLLM: made for each request)."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest

SECONDS = 0.5  # a monitor asks every few seconds
IN_A_ROW = 4  # texts that may be made in a row, for whoever looks again as soon as a request has its answer


class MetricsText:
    """Limits how often the text of a registry is made: a few times in a row, then twice a second. In between it repeats the last
    one, which is less than `SECONDS` old.

    Invariant: `_left` texts may be made now; one more is allowed every `SECONDS`.
    """

    def __init__(self) -> None:
        self._text = b""
        self._left, self._counted = float(IN_A_ROW), time.monotonic()

    def get(self, registry: CollectorRegistry) -> bytes:
        """The text in Prometheus' format."""
        now = time.monotonic()
        self._left = min(IN_A_ROW, self._left + (now - self._counted) / SECONDS)
        self._counted = now
        if self._left >= 1:
            self._left -= 1
            self._text = generate_latest(registry)
        return self._text
