"""`--profiler-config`, vLLM's JSON (vllm/config/profiler.py, ProfilerConfig). Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stage03_engine.errors import ConfigError

SWITCHES = ("with_stack", "record_shapes", "with_memory", "with_flops", "use_gzip")
NOTHING_TO_DO = {
    "torch_profiler_activities": (None,),
    "torch_profiler_dump_cuda_time_total": (True, False),  # a table beside the profile
    "ignore_frontend": (True, False),  # the engine alone is recorded
    "capture_torch_profiler": (False,),
    "detailed_trace_annotation": (False,),
    "delay_iterations": (0,),
    "max_iterations": (0,),
    "warmup_iterations": (0,),
    "active_iterations": (5,),
    "wait_iterations": (0,),
}
"""Other keys -> the values that change nothing here."""


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings, by name. Raises ConfigError that names the key."""
    kind, folder = given.get("profiler"), given.get("torch_profiler_dir") or None
    if kind not in (None, "torch"):
        raise ConfigError(f"profiler_config: profiler {kind!r} is not supported, only 'torch'")
    if (kind is None) != (folder is None):
        raise ConfigError("profiler_config: profiler 'torch' and torch_profiler_dir belong together; give both")
    if folder is not None and not isinstance(folder, str):
        raise ConfigError(f"profiler_config: torch_profiler_dir must be a text, not {folder!r}")
    found: dict[str, Any] = {} if folder is None else {"profiler_dir": os.path.expanduser(folder)}
    for key, value in given.items():
        if key.removeprefix("torch_profiler_") in SWITCHES and key.startswith("torch_profiler_"):
            if not isinstance(value, bool):
                raise ConfigError(f"profiler_config: {key} must be true or false, not {value!r}")
            found[key] = value
        elif key not in ("profiler", "torch_profiler_dir") and not _does_nothing(key, value):
            known = key in NOTHING_TO_DO
            raise ConfigError(f"profiler_config: {key}{f' {value!r}' if known else ''} is not supported; leave it out")
    return found


def _does_nothing(key: str, value: Any) -> bool:
    """1 is not True here."""
    return any(value is each or (value == each and type(value) is type(each)) for each in NOTHING_TO_DO.get(key, ()))
