"""How many front ends an engine has. This is no flag: the launcher of several API servers sets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import internal
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class FrontEnds:
    """The front ends that send requests to an engine."""

    num_front_ends: int = internal(1)


@dataclass(frozen=True)
class FrontEndsFlags:
    """Part of VllmConfig."""

    front_ends: FrontEnds = FrontEnds()

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With several: the engine process that tells them apart, and the client of an engine that the launcher started."""
        several = config.front_ends.num_front_ends > 1
        return {
            "core_proc": ["stage03_engine.core.features.front_ends.core_proc:SharedEngineCoreProc"] * several,
            "client": ["stage03_engine.frontend.features.shared_engine:make_shared_client"] * several,
        }


FEATURE = Feature(
    name="front_ends",
    help="one engine for several API servers",
    room=__package__,
    also=("stage03_engine.frontend.features.shared_engine",),
    settings={"VllmConfig": FrontEndsFlags},
    events=("client.created",),
)
