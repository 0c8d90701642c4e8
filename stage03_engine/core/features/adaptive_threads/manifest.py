"""The flag that lets other work have cores that the compute threads would fight for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class AdaptiveThreads:
    """Part of DeviceConfig."""

    adaptive_threads: bool | None = option(
        None,
        "on a CPU that is busy with other work take fewer compute threads, and later more again; detected: on unless --num-threads is given; the tokens "
        "are the same",
    )


class AdaptiveThreadsFlags:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Who names a number of threads gets that number."""
        given = values["num_threads"] is not None
        return {"adaptive_threads": (not given, "--num-threads" if given else "no --num-threads")}

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """With one worker and native.cpp, whose sums do not depend on the number of threads: those of torch and oneDNN may. Of several workers each would take the
        others, for which it waits in every layer, for work that is in its way."""
        device = config.device_config
        several = getattr(getattr(config, "parallel_config", None), "world_size", 1) > 1
        products = getattr(device, "linear_backend", "torch") in ("auto", "native")
        native = products and device.device == "cpu" and device.attention_backend == "native"
        on = device.adaptive_threads and native and (device.num_threads or 1) > 1 and not several
        return {"runner": ["stage03_engine.core.features.adaptive_threads.hook:AdaptiveThreadsHook"]} if on else {}


FEATURE = Feature(
    name="adaptive_threads",
    help="fewer compute threads while other programs need the cores",
    room=__package__,
    settings={"DeviceConfig": AdaptiveThreads, "VllmConfig": AdaptiveThreadsFlags},
    events=("threads.changed",),
)
