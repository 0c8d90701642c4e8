"""The W3C header traceparent."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="traceparent",
    help="the trace of the caller, from the header traceparent",
    room=__package__,
    parts=(Part("server", ".traceparent:parse_traceparent", key="trace_context"),),
)
