"""Structured output in a replay: the recording shows when a grammar was ready and what it ended. Loaded if a request has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.structured_output.manager import Accepted, StructuredOutputManager
from stage03_engine.core.features.structured_output.scheduler_hook import GrammarSchedulerHook
from stage03_engine.core.sched_output import ModelRunnerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.replay.recording import RecordedHook, RecordedStep
from stage03_engine.sampling_params import SamplingParams
from stagetrace import Event

SOME_GRAMMAR = StructuredOutputsParams(json_object=True)


class RecordedGrammarHook(RecordedHook, GrammarSchedulerHook):
    """The scheduler hook of structured output, over `RecordedGrammars`."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig, created: Event) -> None:
        self.grammars = RecordedGrammars()
        GrammarSchedulerHook.__init__(self, scheduler, config, self.grammars)

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """Does the request have a grammar? Which one does not matter: the recording says when it was ready."""
        if params.get("grammar"):
            asked = msgspec.structs.replace(message.sampling_params, structured_outputs=SOME_GRAMMAR)
            message.sampling_params = asked

    def before_decision(self, step: RecordedStep) -> None:
        """Which grammars were ready by then."""
        self._released |= dict.fromkeys(event.req or "" for event in step.named("grammar.ready"))

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """Which requests the grammars ended, and whose token was held back. Other steps may have been decided meanwhile."""
        self.grammars.ends = step.ends
        for token in step.tokens:
            if token.req in self._held_back:
                self._give_back(token.req)
        self._held_back.update((event.req or "", ([], None)) for event in step.named("grammar.missed"))


class RecordedGrammars(StructuredOutputManager):
    """Stands in for the grammars: says what they said in the recording. Masks are the sampler's business, not the
    scheduler's."""

    def __init__(self) -> None:
        self.ends: dict[str, Event] = {}  # of the step whose results come next

    def grammar_init(
        self, request_id: str, params: SamplingParams, salt: str | None = None, tenant: int | None = None
    ) -> None:
        """Nothing compiles here."""

    def poll(self) -> list[EngineCoreOutput]:
        """What ended outside of a step is an event of its own."""
        return []

    def grammar_bitmask(self, request_ids: list[str]) -> dict[str, bytes] | None:
        """No sampler, no mask."""
        return None

    def is_moving(self, request_id: str) -> bool:
        """A token that was held back is not among those of its step."""
        return False

    def accept_tokens(self, sampled: dict[str, list[int]]) -> Accepted:
        """Which outputs were complete in this step, and which grammars failed."""
        by_grammar = {i: event.args["reason"] for i, event in self.ends.items() if event.args["by"] == "grammar"}
        error = str(FinishReason.ERROR)
        failed = {i: EngineCoreOutput(i, [], None, FinishReason.ERROR) for i, why in by_grammar.items() if why == error}
        return Accepted(set(), {i for i, why in by_grammar.items() if why != error}, failed)

    def free(self, request_id: str) -> None:
        """The request has ended."""
