"""What `external_launcher` needs before there is an executor: the name that a process of torchrun has in the trace, LLM_TP0, where a worker
process would be Worker_TP0; and the refusal to serve. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NoReturn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.errors import ConfigError
from stagetrace import trace


def name_lane(config: VllmConfig, run_id: str, private: Collection[str]) -> None:
    """Called before the trace is opened. An impossible rank is left for the executor to refuse."""
    parallel, rank = config.parallel_config, os.environ.get("RANK", "")
    if trace.proc == "LLM" and rank.isdecimal() and int(rank) < parallel.world_size:
        own = Ranks(int(rank), parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        trace.rename(own.lane.replace("Worker", trace.proc))


def refuse_engine_process(*init: object) -> NoReturn:
    """Called in place of EngineCoreProc. Raises ConfigError: an engine process gets its requests from one front end, and the engine
    processes of the other ranks would get others, or none."""
    raise ConfigError(
        "distributed_executor_backend external_launcher is for LLM(...) and `python -m stage03_engine generate`, where every process gets "
        "all requests; a server gets them in one process only: use mp"
    )
