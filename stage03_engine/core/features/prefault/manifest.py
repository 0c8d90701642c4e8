"""The flag that has the KV cache's memory ready before requests write to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class Prefault:
    """Part of DeviceConfig."""

    prefault_kv_cache: bool = option(
        True,
        "on a CPU: while a core is idle, touch the memory of the KV-cache blocks that the next step may take, so that no prompt waits until the system finds it",
    )


class PrefaultFlags:
    """Part of VllmConfig."""

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With native.cpp, which does it. An engine that may sleep gives memory back instead."""
        device = config.device_config
        native = device.device == "cpu" and device.attention_backend == "native"
        sleeps = getattr(config.model_config, "enable_sleep_mode", False)
        on = getattr(device, "prefault_kv_cache", False) and native and not sleeps
        return {"runner": ["stage03_engine.core.features.prefault.hook:PrefaultHook"]} if on else {}


FEATURE = Feature(
    name="prefault",
    help="memory for the KV cache, before a request needs it",
    room=__package__,
    settings={"DeviceConfig": Prefault, "VllmConfig": PrefaultFlags},
    events=("kv_cache.prefault",),
)
