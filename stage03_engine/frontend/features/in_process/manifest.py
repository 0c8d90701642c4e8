"""Clients of an engine core in this process, or without an event loop."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="in_process",
    help="the engine without a process of its own, or without an event loop: `--in-process`, and `LLM`",
    room=__package__,
    also=("stage03_engine.llm",),
    parts=(
        Part("engine", ".inproc_client:in_this_process", key="client_in_this_process"),
        Part("engine", ".sync_mp_client:SyncMPClient", key="client_without_event_loop"),
        Part("engine", "stage03_engine.llm:LLM", key="llm"),
        Part("engine", "stage03_engine.llm:run", key="generate"),
        Part("client", ".async_inproc_client:AsyncInprocClient", key="in_process"),
    ),
    events=("client.created", "engine.failed"),
)
