"""A connector that answers from a recording, for a replay: what was found, what was being saved, and what was saved by when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any

from stage03_engine.core.features.kv_transfer.base import NOTHING, FullBlock, KVConnectorScheduler, Match, Transfers
from stage03_engine.core.features.kv_transfer.connector import KVConnectorHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest
from stage03_engine.replay.recording import RecordedHook, RecordedStep


class RecordedConnector(KVConnectorScheduler):
    """Told by the hook below what the recording says next."""

    waits: set[str]  # requests that were held back
    answers: dict[str, tuple[Future[None], Match]]
    saving: list[int]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        """It waits for an event of the recording."""
        answer, match = self.answers.setdefault(request.request_id, (Future(), NOTHING))
        return match if answer.done() else answer

    def build_connector_meta(self, full: Sequence[FullBlock], room: int) -> Transfers:
        """The same blocks stay in use."""
        saving, self.saving = self.saving, []
        return Transfers([], [(block, b"", -1) for block in saving])


class RecordedTransfersHook(RecordedHook, KVConnectorHook):
    """The scheduler hook of `--kv-transfer-config`, over a recording."""

    def _connect(self) -> KVConnectorScheduler:
        self._recorded = RecordedConnector(self.scheduler, self.config)
        self._recorded.waits, self._recorded.answers, self._recorded.saving = set(), {}, []
        self._written: list[int] = []
        self._most_seconds = inf
        return self._recorded

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """Does the request wait for the connector?"""
        if params.get("kv_transfer"):
            self._recorded.waits.add(message.request_id)

    def _may_ask(self, request: Request) -> bool:
        """As it did."""
        return request.request_id in self._recorded.waits

    def before_decision(self, step: RecordedStep) -> None:
        """What was found by then, and who asks in this step."""
        size = self.scheduler.kv_cache_manager.block_size
        for event in step.named("kv_transfer.found"):
            if (asked := self._asked.get(request_id := event.req or "")) is not None:
                found = Match(event.args["first"] * size, event.args["num_blocks"] * size)
                self._recorded.answers[request_id] = asked.answer, found
                asked.answer.set_result(None)
        self._take_answers()
        self._recorded.answers = {
            request_id: answer for request_id, answer in self._recorded.answers.items() if request_id in self._asked
        }
        self._recorded.waits = {event.req or "" for event in step.named("kv_transfer.asked")}
        self._recorded.saving = [block for event in step.named("kv_transfer.writing") for block in event.args["blocks"]]

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """What was saved by then."""
        self._written = [block for event in step.named("kv_transfer.written") for block in event.args["blocks"]]

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The same blocks are let go."""
        self._let_go(self._written, output.step)
        return []
