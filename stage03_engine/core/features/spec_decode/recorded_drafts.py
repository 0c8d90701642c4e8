"""Drafts in a replay: the recording shows how many were proposed, and accepted."""

from __future__ import annotations

from stage03_engine.core.features.spec_decode.draft_scheduler import NEXT_DRAFTS, DraftHook, NextDrafts
from stage03_engine.core.sched_output import ModelRunnerOutput
from stage03_engine.replay.recording import FILLER, RecordedHook, RecordedStep


class RecordedDraftHook(RecordedHook, DraftHook):
    """The scheduler hook of `--speculative-config`, over a recording."""

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """As many drafts as were proposed."""
        for event in step.named("spec.proposed"):
            results.add(event.req or "", NEXT_DRAFTS, NextDrafts([FILLER] * event.args["num_tokens"]))
