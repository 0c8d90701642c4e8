"""How many cores a process may really use."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="cores",
    help="physical cores, and the quota of a container",
    room=__package__,
    parts=(Part("engine", ".cores:measure", key="cores"),),
)
