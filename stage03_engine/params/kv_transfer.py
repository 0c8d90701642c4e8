"""Where the KV-cache blocks of a request are, or are to stay (vLLM: `kv_transfer_params`)."""

from __future__ import annotations

from typing import Any


class KVTransferParams:
    """Part of SamplingParams."""

    __slots__ = ()
    kv_transfer_params: dict[str, Any] | None = None
    """For a producer {"do_remote_decode": true}; its answer is what a consumer is given."""
