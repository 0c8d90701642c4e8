"""What the router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from stage02_server.features.router.servers import Server, Servers


class RouterMetrics:
    """Of each server: its answers by status, its requests in progress, and whether it is up."""

    def __init__(self, servers: Servers) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "stages:router_answers", "Answers of a server, by HTTP status; lost: it ended, or did not answer in time.",
            ("role", "server", "status"), registry=self._registry,
        )  # fmt: skip
        self._registry.register(_Now(servers))

    def answered(self, server: Server, status: str) -> None:
        """`status` is a number, or `lost`."""
        self._answers.labels(server.role, server.url, status).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Read when it is asked for."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Two gauges."""
        running = GaugeMetricFamily(
            "stages:router_requests_running", "Requests at a server.", labels=("role", "server")
        )
        up = GaugeMetricFamily("stages:router_server_up", "1 if a server takes requests.", labels=("role", "server"))
        for server in self._servers.all:
            running.add_metric((server.role, server.url), server.busy)
            up.add_metric((server.role, server.url), int(bool(server.is_up)))
        yield from (running, up)
