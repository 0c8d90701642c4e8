"""How many cores a process may really use."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="cores",
    help="physical cores, the quota of a container, and OMP_NUM_THREADS",
    room=__package__,
    parts=(Part("engine", ".cores:measure", key="cores"),),
)
