"""The story of a recording of any size: requests are handed over when they have ended, steps when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stagetrace.event import Event
from stagetrace.read.story import RequestStory, StepStory, Story

NUM_ENDED_KEPT = (
    1024  # the last events of a request may come after its end; by then this many others will not have ended
)


def tell_bounded(
    events: Iterable[Event],
    on_request: Callable[[RequestStory], None],
    on_step: Callable[[StepStory], None] = lambda step: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Story:
    """Hand over each event, step and request once; the returned story holds what the recording says as a whole."""
    story = Story(on_step)
    ended: dict[str, None] = {}  # in the order of their ends
    for event in events:
        story.feed(event)
        on_event(event)
        if event.req is not None and _is_end(event, story.requests[event.req]):
            ended[event.req] = None
            if len(ended) > NUM_ENDED_KEPT:
                oldest = next(iter(ended))
                del ended[oldest]
                story.deliveries.forget(oldest)
                on_request(story.requests.pop(oldest))
    for request in story.requests.values():
        on_request(request)
    story.requests.clear()
    return story


def _is_end(event: Event, request: RequestStory) -> bool:
    """Is this the last event of a request, or nearly?"""
    if event.name == "generate.yield":
        return bool(event.args["finished"])
    if event.name == "request.finished":
        return "generate.start" not in request.first  # no caller will be handed an output of this very id
    return event.name in ("request.aborted", "request.refused", "beam.finished")
