"""Folders of sockets that a kill -9 leaves behind."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="dead_folders",
    help="the next start removes the sockets that a killed server left",
    room=__package__,
    parts=(Part("engine", ".dead_folders:claim_folder", key="socket_folder"),),
)
