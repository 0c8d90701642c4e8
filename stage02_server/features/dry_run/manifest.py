"""`serve --dry-run`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="dry_run",
    help="all settings, their origin, and what a start would take, without starting",
    room=__package__,
    parts=(Part("serve", ".table:table", key="dry_run"),),
)
