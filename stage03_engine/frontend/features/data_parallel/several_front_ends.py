"""Several engines for several API servers: the launcher starts the engines, each server balances between all of them.

vLLM: run_multi_api_server with data_parallel_size above 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.frontend.features.data_parallel.coordinator import CountsLink
from stage03_engine.frontend.features.data_parallel.devices import own_devices
from stage03_engine.frontend.features.data_parallel.engine import MakeEngine, numbered, share_of
from stage03_engine.frontend.features.data_parallel.restart import RestartLimit

if TYPE_CHECKING:
    from stage03_engine.frontend.features.shared_engine import LauncherLink


class LauncherDecides(RestartLimit):
    """An engine is started again unless the launcher, which counts the deaths, says that it is not."""

    def __init__(self, most: int, link: LauncherLink) -> None:
        super().__init__(most)
        self._link, self.total = link, link.engine_restarts

    def take(self) -> bool:
        """See RestartLimit. An engine may report its own death before the launcher knows of it: then a successor is expected."""
        self.total += (may := self.most > 0 and self._link.goes_on)
        return may


def start_engine(config: VllmConfig, index: int, later: bool) -> EngineProcess:
    """The process of one of the engines, with its part of the machine; `later`: as in `share_of`. Raises OSError, and ConfigError if there is no GPU for it."""
    with own_devices(config, index):
        config = share_of(config, config.data_parallel_config.data_parallel_size, later)
        return EngineProcess(numbered(config, index), index)


def make_front_end(config: VllmConfig, link: LauncherLink, make_engine: MakeEngine) -> DPLBAsyncMPClient:
    """The client of an API server. `make_engine` makes the client of an engine that the launcher has started.

    Two servers draw different seeds for requests without one.
    """
    assert link.coordinator is not None
    model = replace(config.model_config, seed=config.model_config.seed + link.number)
    limit = LauncherDecides(config.data_parallel_config.data_parallel_restart, link)
    return DPLBAsyncMPClient(replace(config, model_config=model), make_engine, CountsLink(link.coordinator), limit)
