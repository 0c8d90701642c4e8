"""Adapters in a replay: the recording shows which request has which, how many places there are, and who keeps one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.lora.scheduler_hook import LoRASchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.replay.recording import RecordedHook, RecordedStep
from stagetrace import Event


class RecordedLoRAHook(RecordedHook, LoRASchedulerHook):
    """The scheduler hook of adapters, without adapters. The hashes of blocks are in the recording."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig, created: Event) -> None:
        LoRASchedulerHook.__init__(self, scheduler, config)

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """The adapter of the request. Its name is not needed."""
        if told := params.get("lora"):
            self.max_loras = told["max_loras"]
            with_adapter = msgspec.structs.replace(message.sampling_params, lora="recorded", lora_int_id=told["id"])
            message.sampling_params = with_adapter

    def added(self, request: Request) -> None:
        """It was there."""

    def before_decision(self, step: RecordedStep) -> None:
        """Which adapters keep their place from now on."""
        for event in step.named("lora.pinned"):
            self._asked_pins = set(event.args["ids"])
