"""The flag that binds the engine process to cores (vllm/v1/worker/cpu_worker.py, VLLM_CPU_OMP_THREADS_BIND)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True)
class ThreadsBind:
    """Part of DeviceConfig."""

    cpu_omp_threads_bind: str | None = option(
        None,
        "cores that the engine process computes on, such as 0-3 or 0,2, a thread for each; auto and nobind leave it to the "
        "system; nothing on a GPU (vLLM: VLLM_CPU_OMP_THREADS_BIND)",
    )


class BindingFlags:
    """Part of VllmConfig."""

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """A compute thread per core. Raises ConfigError."""
        cores = cores_of(values["cpu_omp_threads_bind"])
        return {"num_threads": (len(cores), "--cpu-omp-threads-bind")} if cores and values["device"] != "cuda" else {}

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """On a CPU the engine process binds itself."""
        device = config.device_config
        binds = device.device == "cpu" and cores_of(device.cpu_omp_threads_bind)
        return {"process": ["stage03_engine.core.features.cpu_binding.bind:bind_process"]} if binds else {}


def cores_of(text: str | None) -> set[int]:
    """The numbers of the cores; none if the system is to choose. Raises ConfigError."""
    if text is None or text.strip() in ("auto", "nobind", "all"):
        return set()
    if "|" in text:
        raise ConfigError(
            f"cpu_omp_threads_bind {text!r} names several groups of cores, but there is one engine process"
        )
    cores: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"cpu_omp_threads_bind must be like 0-3 or 0,2, or auto, or nobind; not {text!r}")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"cpu_omp_threads_bind {text!r}: this system binds no process to cores; leave it out")
    usable = os.sched_getaffinity(0)
    if missing := sorted(cores - usable):
        raise ConfigError(f"cpu_omp_threads_bind {text!r}: this process cannot use core {missing[0]}")
    return cores


FEATURE = Feature(
    name="cpu_binding",
    help="the cores that the engine process computes on",
    room=__package__,
    settings={"DeviceConfig": ThreadsBind, "VllmConfig": BindingFlags},
)
