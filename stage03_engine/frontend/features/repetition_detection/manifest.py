"""`repetition_detection`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="repetition_detection",
    help="ends an answer that repeats itself",
    room=__package__,
    also=("stage03_engine.params.repetition_detection",),
    parts=(Part("params", "stage03_engine.params.repetition_detection:RepetitionDetection"),),
    events=("request.repetition_found",),
)
