"""The flags of adapters that come and go while the server runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stage02_server.api_server import Services


@dataclass(frozen=True)
class AdapterFlags:
    """Who may bring adapters, and from where."""

    allow_runtime_lora_updating: bool = option(
        False,
        "answer POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, with several API keys only for the first of them (vLLM: "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
    )
    lora_root: str | None = option(
        None,
        "the folder below which adapters lie that may be loaded while the server runs; none may be loaded if not given",
        protects=True,
    )
    max_known_loras: int = option(
        64, "most adapters that the server knows at once (400 beyond), those of --lora-modules among them", at_least=1
    )

    def check(self) -> None:
        """Raises ConfigError for a folder that is not there, or that nothing would be loaded from."""
        if self.lora_root is None:
            return
        if not self.allow_runtime_lora_updating:
            raise ConfigError("lora_root needs allow_runtime_lora_updating (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)")
        if not os.path.isdir(self.lora_root):
            raise ConfigError(f"lora_root: there is no folder {self.lora_root!r}")


def install(app: FastAPI, services: Services) -> None:
    """With --enable-lora: the list of models and the metrics follow the list of adapters."""
    if services.engine.vllm_config.lora_config.enable_lora:
        from stage02_server.features.adapters.shown import show

        show(services)


FEATURE = Feature(
    name="adapters",
    help="adapters over HTTP: in /v1/models and /metrics, and loaded and unloaded while the server runs",
    room=__package__,
    settings={"FrontendArgs": AdapterFlags},
    parts=(
        Part("routes", ".manifest:install"),
        Part("routes", ".routes:install", flags=("allow_runtime_lora_updating",)),
    ),
    needs=("lora",),
)
