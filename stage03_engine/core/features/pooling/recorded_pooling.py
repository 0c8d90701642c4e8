"""Pooling in a replay: the recording shows when a prompt had become vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage03_engine.core.features.pooling.hooks import POOLED, Pooled, PoolingSchedulerHook
from stage03_engine.core.sched_output import ModelRunnerOutput
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.params.pooling_params import PoolingParams
from stage03_engine.replay.recording import RecordedHook, RecordedStep


class RecordedPoolingHook(RecordedHook, PoolingSchedulerHook):
    """The scheduler hook of pooling, over a recording."""

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """The settings of the pooling request."""
        if "pooling" in params:
            message.task = PoolingParams(**params["pooling"])

    def before_results(self, step: RecordedStep, results: ModelRunnerOutput) -> None:
        """An empty vector for each that came."""
        for request_id in step.pooled:
            results.add(request_id, POOLED, Pooled([b""]))
