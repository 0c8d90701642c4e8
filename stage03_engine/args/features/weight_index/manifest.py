"""model.safetensors.index.json."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="weight_index",
    help="checkpoints in several files",
    room=__package__,
    parts=(Part("engine", ".weight_index:files_of", key="weight_index"),),
)
