"""What several engines add to the server; a server with one engine imports none of it."""

from __future__ import annotations

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage03_engine.mixins import load

ROUTES = "stage02_server.features.data_parallel.routes:install"


def install(app: FastAPI, services: Services) -> None:
    """Add it, if the settings ask for another client than that of one engine."""
    if services.engine.vllm_config.hooks("client"):
        load(ROUTES)(app, services)
