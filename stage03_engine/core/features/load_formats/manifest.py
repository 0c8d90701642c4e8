"""`--load-format pt` and `sharded_state`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="load_formats",
    help="weights that are not stored as one whole in safetensors files",
    room=__package__,
    parts=(
        Part(
            "weights",
            ".formats:PT",
            key="pt",
            help="pickled tensors, *.bin or *.pt; taken by auto where there are no others",
        ),
        Part(
            "weights",
            ".formats:SHARDED_STATE",
            key="sharded_state",
            help="each worker's slices, as save_sharded_state writes them",
        ),
    ),
)
