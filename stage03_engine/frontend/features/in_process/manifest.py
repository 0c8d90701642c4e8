"""Clients of an engine core in this process, or without an event loop."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class InProcessFlags:
    """Where the engine core runs."""

    in_process: bool = option(
        False, "run the engine inside the API process, for print and breakpoint(); slower, and without ZMQ"
    )


FEATURE = Feature(
    name="in_process",
    help="the engine without a process of its own, or without an event loop: `--in-process`, and `LLM`",
    room=__package__,
    also=("stage03_engine.llm",),
    settings={"FrontendArgs": InProcessFlags},
    parts=(
        Part("engine", ".inproc_client:in_this_process", key="client_in_this_process"),
        Part("engine", ".sync_mp_client:SyncMPClient", key="client_without_event_loop"),
        Part("engine", "stage03_engine.llm:LLM", key="llm"),
        Part("engine", "stage03_engine.llm:run", key="generate"),
        Part("client", ".async_inproc_client:serve_in_process", key="in_process=True"),
    ),
    events=("client.created", "engine.failed"),
)
