"""`--scheduler-cls` and `--block-pool-cls`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="own_classes",
    help="a scheduler or a block pool of your own",
    room=__package__,
    parts=(
        Part("engine", ".own_classes:make_scheduler", key="own_scheduler"),
        Part("engine", ".construct:construct", key="construct"),
    ),
)
