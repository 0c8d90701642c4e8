"""The metric `vllm:engine_sleep_state` (vllm/v1/metrics/loggers.py, record_sleep_state)."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import Gauge

from stage02_server.api_server import Services, served_model_names
from stage03_engine.frontend.features.sleep.calls import watch

STATES = ("awake", "weights_offloaded", "discard_all")
"""By level: vLLM's names, which say what becomes of the weights on a GPU."""
TEXT = "1 for the state that the engine is in: awake, weights_offloaded (level 1) or discard_all (level 2); 0 for the others."


def install(app: FastAPI, services: Services) -> None:
    """From now on /metrics shows it, for each engine. Of several API servers the one that was asked last knows."""
    config = services.engine.vllm_config
    gauge = Gauge(
        "vllm:engine_sleep_state", TEXT, ["model_name", "engine", "sleep_state"],
        registry=services.registry, multiprocess_mode="mostrecent",
    )  # fmt: skip
    model, several = served_model_names(config, services.args)[0], getattr(config, "data_parallel_config", None)

    def show(level: int) -> None:
        for engine in (0,) if several is None else several.engine_indices:
            for number, state in enumerate(STATES):
                gauge.labels(model, engine, state).set(number == level)

    show(0)
    watch(services.engine, show)
