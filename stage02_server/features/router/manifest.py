"""`stages router`: one address for prefill servers and decode servers."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="router",
    help="one address for servers that compute prompts and servers that go on with them",
    room=__package__,
    parts=(
        Part(
            "command",
            ".command:RouterSubcommand",
            key="router",
            help="one address for prefill servers and decode servers",
        ),
    ),
    needs=("hardening",),  # the limits of its HTTP side
    events=("router.answered", "router.received", "router.sent", "router.server"),
)
