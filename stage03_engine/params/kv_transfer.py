"""Where the KV-cache blocks of a request are, or are to stay (vLLM: `kv_transfer_params`)."""

from __future__ import annotations

from typing import Any

_PLACES = 1 << 63


class KVTransferParams:
    """Part of SamplingParams."""

    __slots__ = ()
    kv_transfer_params: dict[str, Any] | None = None
    """For a producer {"do_remote_decode": true}; its answer is what a consumer is given."""

    def check(self: Any) -> None:
        """Raises InvalidRequestError for what no producer said: the engine would fail with it."""
        given = self.kv_transfer_params
        fits = isinstance(given, dict) and (not given.get("do_remote_prefill") or _is_somewhere(given))
        allowed = 'what a producer answered, or {"do_remote_decode": true}'
        self._check(fits, "kv_transfer_params", allowed)


def _is_somewhere(params: dict[str, Any]) -> bool:
    """An address, and a place there."""
    host, port, place = (params.get(f"remote_{name}") for name in ("host", "port", "request_id"))
    can_be_host = isinstance(host, str) and host.isascii() and host.isprintable() and 0 < len(host) < 256
    return can_be_host and _is_number(port, 1, 1 << 16) and _is_number(place, 0, _PLACES)


def _is_number(value: object, first: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and first <= value < end
