"""`--scheduling-policy fair`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="fair_queue",
    help="a scheduling policy that gives each HTTP request its turn, however many prompts and answers it asks for",
    room=__package__,
    parts=(Part("policy", ".fair_queue:FairQueue", key="fair"),),
    events=("sched.turn",),
)
