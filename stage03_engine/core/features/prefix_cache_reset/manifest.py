"""POST /reset_prefix_cache."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="prefix_cache_reset",
    help="forgets all cached prefixes",
    room=__package__,
    parts=(Part("call", ".prefix_cache_reset:reset_prefix_cache", key="reset_prefix_cache"),),
    events=("kv.reset",),
)
