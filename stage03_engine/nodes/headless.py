"""`serve MODEL --headless`: a machine without an API server, which works for one on another machine (vllm/entrypoints/cli/serve.py, run_headless)."""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load

ENGINES = "stage03_engine.frontend.features.data_parallel.nodes.headless:run_engines"
WORKERS = "stage03_engine.core.features.distributed.machines.node:run_node"


def run_headless(config: VllmConfig) -> int:
    """Work until the server elsewhere ends; returns the exit code. Raises StagesError."""
    if getattr(getattr(config, "parallel_config", None), "nnodes", 1) > 1:
        return int(load(WORKERS)(config))
    if getattr(getattr(config, "data_parallel_config", None), "data_parallel_size", 1) > 1:
        return int(load(ENGINES)(config))
    raise ConfigError(
        "headless is for a machine that works for a server elsewhere: name it with data_parallel_address and data_parallel_size, or with "
        "nnodes, node_rank and master_addr"
    )
