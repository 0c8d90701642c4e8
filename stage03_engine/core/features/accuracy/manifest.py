"""What the commands of `quantization` and `kv_cache_dtype` share. No server needs it."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(
    name="accuracy", help="measures what a number format of weights or of the KV cache costs", room=__package__
)
