"""What is different in one of several API servers: its launcher watches it, it shows the metrics of all, and tenants are the same on all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from stage02_server.api_server import Services
from stage02_server.features.api_servers.this_server import set_ready, this_server
from stage03_engine.frontend.features.shared_engine import Alive, launcher_link
from stage03_engine.frontend.metrics import StatLogger

COMPUTED = ("stages:server_state",)
"""Metrics that are computed when they are read. No file has them, so they describe the server that answers."""


class MergedRegistry(CollectorRegistry):
    """What all API servers have counted (vllm/v1/metrics/prometheus.py, get_prometheus_registry).

    Each server keeps its numbers in files of one folder. Counters and histograms are added up. So are gauges: one server at a
    time hears from an engine's scheduler, the gauges of the others are 0, and those of a dead one are removed.
    """

    def __init__(self, own: CollectorRegistry, folder: str) -> None:
        super().__init__()
        self._own, self._files = own, MultiProcessCollector(None, folder)

    def register(self, collector: object) -> None:
        """Metrics that are made later belong to this server."""
        self._own.register(collector)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """Each metric once: merged, or else this server's own."""
        merged = {metric.name: metric for metric in self._files.collect() if metric.name not in COMPUTED}
        yield from merged.values()
        yield from (metric for metric in self._own.collect() if metric.name not in merged)


class _Readiness(StatLogger):
    """Tells the launcher when this server is ready. Asked only from time to time, it could halt before its first answer, unnoticed."""

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    def engine_ready(self) -> None:
        set_ready()
        launcher_link().tell(Alive())


def install(app: FastAPI, services: Services) -> None:
    """Does nothing in a process that is not one of several API servers."""
    if (start := this_server()) is None:
        return
    services.engine.stat_loggers.append(_Readiness())
    services.registry = MergedRegistry(services.registry, start.folder)
    if (tenants := getattr(app.state, "tenants", None)) is not None:
        tenants.share_salts(services.engine.vllm_config.cache_config.prefix_caching_hash_seed or start.secret)
