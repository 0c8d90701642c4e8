"""Swapping in a replay: as many blocks of CPU memory as the recorded engine had."""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.swap_space.swap_space import SwapHook
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.replay.recording import RecordedHook
from stagetrace import Event


class RecordedSwapHook(RecordedHook, SwapHook):
    """The scheduler hook of `--preemption-mode swap`, over a recording."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig, created: Event) -> None:
        SwapHook.__init__(self, scheduler, config, created.args["num_swap_blocks"])
