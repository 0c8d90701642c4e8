"""What a number format costs in accuracy, measured: shared by the commands of `quantization` and `kv_cache_dtype`, each of which may be there alone."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(name="accuracy", help="what the commands that measure accuracy share", room=__package__)
