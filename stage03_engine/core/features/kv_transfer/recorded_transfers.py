"""The connector without a folder, for a replay: what was found, what was being written, and what was written by when, is taken from the recording."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.connector import Found, KVConnectorHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest
from stage03_engine.replay.recording import RecordedHook, RecordedStep


class RecordedTransfersHook(RecordedHook, KVConnectorHook):
    """The scheduler hook of `--kv-transfer-config`, over a recording."""

    def _open(self, config: VllmConfig) -> None:
        self._waits = False
        self._saving: list[int] = []
        self._written: list[int] = []

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """Does the request wait for the folder?"""
        self._waits = bool(params.get("kv_transfer"))

    def added(self, request: Request) -> None:
        """It waits for an event of the recording."""
        if self._waits:
            self._found[request.request_id] = Found(0, 0)
            self._reading[request.request_id] = Future()

    def before_decision(self, step: RecordedStep) -> None:
        """What was read by then."""
        for event in step.named("kv_transfer.found"):
            request_id, first, count = event.req or "", event.args["first"], event.args["num_blocks"]
            if self._reading.pop(request_id, None) is not None:
                self._found[request_id] = Found(first, 0, [b""] * count)
                self._released[request_id] = None
        self._saving = [block for event in step.named("kv_transfer.writing") for block in event.args["blocks"]]

    def _end(self, found: Found, reading: Future[None]) -> None:
        """There is no thread that adds to it."""

    def decided(self, output: SchedulerOutput) -> None:
        """The same blocks stay in use."""
        self._hold(self._saving)

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """What was written by then."""
        self._written = [block for event in step.named("kv_transfer.written") for block in event.args["blocks"]]

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The same blocks are let go."""
        self._let_go(self._written, output.step)
        return []

    def shutdown(self) -> None:
        """There is no thread."""
