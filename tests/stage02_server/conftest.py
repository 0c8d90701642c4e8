"""Fixtures: the API server with the echo engine, in this process and in its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server_under_test import InProcessServer, ServerProcess

from stage02_server.features.echo_engine.echo_engine import EchoCoreClient


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    server = InProcessServer()
    yield server
    server.close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., InProcessServer]]:
    servers: list[InProcessServer] = []

    def make(client: EchoCoreClient | None = None, **args: Any) -> InProcessServer:
        servers.append(InProcessServer(client, **args))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def start(*args: str, **how: Any) -> ServerProcess:
        servers.append(ServerProcess(*args, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
