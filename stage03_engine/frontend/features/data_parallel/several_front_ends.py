"""Several engines for several API servers: the launcher starts the engines, each server balances between all of them.

vLLM: run_multi_api_server with data_parallel_size above 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.frontend.features.data_parallel.coordinator import CountsLink
from stage03_engine.frontend.features.data_parallel.devices import own_devices
from stage03_engine.frontend.features.data_parallel.engine import MakeEngine, share_of
from stage03_engine.frontend.features.data_parallel.restart import RestartLimit


def start_engine(config: VllmConfig, index: int) -> EngineProcess:
    """The process of one of the engines, with its part of the machine. Raises OSError, and ConfigError if there is no GPU for it."""
    with own_devices(config, index):
        return EngineProcess(share_of(config, config.data_parallel_config.data_parallel_size), index)


def make_front_end(config: VllmConfig, number: int, folder: Path, make_engine: MakeEngine) -> DPLBAsyncMPClient:
    """The client of the API server with this number. `folder` is the coordinator's; `make_engine` makes the client of an engine that
    is there already.

    Two servers draw different seeds for requests without one. No server can start an engine again that is not its own, so the
    first one that dies ends all, as in vLLM.
    """
    model = replace(config.model_config, seed=config.model_config.seed + number)
    return DPLBAsyncMPClient(replace(config, model_config=model), make_engine, CountsLink(folder), RestartLimit(0))
