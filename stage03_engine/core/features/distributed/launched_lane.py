"""The name in the trace of a process that torchrun started: LLM_TP0, as its worker alone would be Worker_TP0. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.ranks import Ranks
from stagetrace import trace


def name_lane(config: VllmConfig, run_id: str, private: Collection[str]) -> None:
    """Called before the trace is opened. A rank that cannot be is left to the executor to refuse."""
    parallel, rank = config.parallel_config, os.environ.get("RANK", "")
    if trace.proc == "LLM" and rank.isdecimal() and int(rank) < parallel.world_size:
        own = Ranks(int(rank), parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        trace.rename(own.lane.replace("Worker", trace.proc))
