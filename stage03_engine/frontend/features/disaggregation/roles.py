"""Which of several engines computes prompts, and which goes on with them."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from stage03_engine.config import VllmConfig
from stage03_engine.plugins import wanted

MAX_READ_SECONDS = 10.0
"""A request waits no longer for its blocks: what has not come by then is computed. The death of the other engine is noticed sooner."""


class Roles:
    """The settings of each engine: the first ones compute prompts. `folder` is private, and holds the secret of their links."""

    def __init__(self, config: VllmConfig, folder: Path) -> None:
        self.num_prefill: int = config.disaggregation_config.num_prefill
        self.num_decode: int = config.disaggregation_config.num_decode
        self._secret = folder / "secret"
        self._hash_seed = config.cache_config.prefix_caching_hash_seed or secrets.token_hex(16)
        descriptor = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))

    def __str__(self) -> str:
        names = [f"EngineCore_DP{engine}" for engine in range(self.num_prefill + self.num_decode)]
        prefill, decode = names[: self.num_prefill], names[self.num_prefill :]
        return f"Prefill, which computes prompts: {', '.join(prefill)}. Decode, which goes on with them: {', '.join(decode)}."

    def computes_prompts(self, engine: int) -> bool:
        """Is this its role? It can do more, when the others are dead."""
        return engine < self.num_prefill

    def of(self, config: VllmConfig, engine: int) -> VllmConfig:
        """The settings of the engine with this number."""
        transfer = wanted("engine", "kv_transfer_config", "what reads kv_transfer_config")({
            "kv_connector": "P2pZmqConnector", "kv_role": "kv_producer" if self.computes_prompts(engine) else "kv_consumer", "kv_port": 0,
            "kv_connector_extra_config": {"max_read_seconds": MAX_READ_SECONDS},
        })  # fmt: skip
        links = replace(config.node_config, node_secret_file=str(self._secret), node_secret_required=True)
        return replace(
            config,
            kv_transfer_config=replace(config.kv_transfer_config, **transfer),
            cache_config=replace(config.cache_config, prefix_caching_hash_seed=self._hash_seed),
            node_config=links,
        )  # type: ignore[call-arg]
