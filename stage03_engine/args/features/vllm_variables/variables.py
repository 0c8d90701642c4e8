"""vLLM's environment variables (vllm/envs.py): those with a counterpart here set it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import Setting, parse_bool
from stage03_engine.args.resolve import Resolved, accepted, detect_device
from stage03_engine.errors import ConfigError

GIB = 1 << 30


def _is_off(text: str) -> bool:
    return not parse_bool(text)


def _log_level(text: str) -> str:
    """Python's other names of a level are vLLM's too."""
    return {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(text.upper(), text.upper())


def _gib(text: str) -> int | None:
    """Bytes; 0 leaves the size open, as in vLLM."""
    if not text.isdecimal() or int(text) > 1 << 20:
        raise ValueError(f"{text!r} is not a number of GiB")
    return int(text) * GIB or None


@dataclass(frozen=True)
class Counterpart:
    """The setting behind one of vLLM's variables, and how its text becomes a value (by default as everywhere)."""

    setting: str
    read: Callable[[str], Any] = str
    only_on: str | None = None  # the device without which the variable says nothing


COUNTERPARTS = {
    "FORWARDED_ALLOW_IPS": Counterpart("forwarded_allow_ips"),  # uvicorn's own, which works with vLLM too
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": Counterpart("allow_runtime_lora_updating"),
    "VLLM_API_KEY": Counterpart("api_key", lambda text: (text,)),
    "VLLM_BATCH_INVARIANT": Counterpart("batch_invariant"),
    "VLLM_CONFIGURE_LOGGING": Counterpart("configure_logging"),
    "VLLM_CPU_KVCACHE_SPACE": Counterpart("kv_cache_memory_bytes", _gib, only_on="cpu"),
    "VLLM_CPU_OMP_THREADS_BIND": Counterpart("cpu_omp_threads_bind", only_on="cpu"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": Counterpart("in_process", _is_off),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": Counterpart("timeout_keep_alive"),
    "VLLM_LOGGING_CONFIG_PATH": Counterpart("log_config_file"),
    "VLLM_LOGGING_LEVEL": Counterpart("log_level", _log_level),
    "VLLM_LOG_STATS_INTERVAL": Counterpart("log_stats_interval"),
    "VLLM_SERVER_DEV_MODE": Counterpart("server_dev_mode"),
    "VLLM_TORCH_PROFILER_DIR": Counterpart("profiler_dir", os.path.expanduser),
    "VLLM_TORCH_PROFILER_RECORD_SHAPES": Counterpart("torch_profiler_record_shapes"),
    "VLLM_TORCH_PROFILER_USE_GZIP": Counterpart("torch_profiler_use_gzip"),
    "VLLM_TORCH_PROFILER_WITH_FLOPS": Counterpart("torch_profiler_with_flops"),
    "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": Counterpart("torch_profiler_with_memory"),
    "VLLM_TORCH_PROFILER_WITH_STACK": Counterpart("torch_profiler_with_stack"),
}
FIXED = {
    "VLLM_USE_V1": (("1",), "only the V1 engine is built"),
    "VLLM_WORKER_MULTIPROC_METHOD": (
        ("spawn", "forkserver"),
        "the processes that start others have threads, whose locks a fork would hold for ever",
    ),
}
"""Variable -> the values that it can have here, and why no other. distributed/fork_server.py acts on the second one's."""
NOTHING_TO_DO = {"VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "VLLM_USAGE_SOURCE"}  # usage is never reported here


def counterparts(
    settings: Sequence[Setting], resolved: Mapping[str, Resolved], environ: Mapping[str, str]
) -> dict[str, Resolved]:
    """What these variables say for settings that neither the command line nor a variable of ours gave. Raises ConfigError."""
    check_fixed(environ)
    found, known = {}, {setting.name: setting for setting in settings}
    for variable, counterpart in COUNTERPARTS.items():
        name, value = counterpart.setting, value_of(variable, environ)
        if value is None or name not in known:
            continue
        value = accepted(known[name], value, f"environment variable {variable}")
        only_on = counterpart.only_on
        if resolved[name].source in ("config file", "default") and only_on in (None, _device(resolved)):
            found[name] = Resolved(value, "environment", variable)
    return found


def _device(resolved: Mapping[str, Resolved]) -> str:
    asked = resolved["device"].value
    return detect_device()[0] if asked == "auto" else str(asked)


def value_of(variable: str, environ: Mapping[str, str] = os.environ) -> Any:
    """What a variable of COUNTERPARTS says, None if it is not set or empty. Raises ConfigError that names it, also for spaces
    alone, and for an empty key: a key of which nothing is left must not open the server."""
    given = environ.get(variable, "")
    text = given.strip()
    if not text and (given or (variable in environ and COUNTERPARTS[variable].setting == "api_key")):
        raise ConfigError(f"environment variable {variable}: {given!r} is blank; unset it, or give it a value")
    try:
        return COUNTERPARTS[variable].read(text) if text else None
    except ValueError as error:
        raise ConfigError(f"environment variable {variable}: {error}") from None


def multiprocessing_wanted() -> bool:
    """Should `LLM` put its engine into a process of its own? Only if VLLM_ENABLE_V1_MULTIPROCESSING says so. (In vLLM that is
    the default.) Raises ConfigError."""
    return value_of("VLLM_ENABLE_V1_MULTIPROCESSING") is False


def check_fixed(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that asks for what can never be here."""
    for variable, (possible, why) in FIXED.items():
        value = environ.get(variable, "").strip()
        if value not in ("", *possible):
            only = f"{possible[0]} is" if len(possible) == 1 else f"{' and '.join(possible)} are"
            raise ConfigError(f"environment variable {variable}: {value!r} is not possible (only {only}): {why}")


def read_here(settings: set[str]) -> set[str]:
    """The variables that mean something for a command with these settings, or for any."""
    given = {name for name, counterpart in COUNTERPARTS.items() if counterpart.setting in settings}
    return given | FIXED.keys() | NOTHING_TO_DO
