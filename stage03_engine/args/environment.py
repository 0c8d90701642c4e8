"""vLLM's environment variables (vllm/envs.py): those with a counterpart here set it; every other one that is set, and a `STAGES_*`
variable that no setting has, is named in one warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from stage03_engine.args.fields import parse_bool
from stage03_engine.args.parser import refuse_absent
from stage03_engine.errors import ConfigError

logger = logging.getLogger(__name__)
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
    """A setting that a variable of vLLM stands for, and how its text becomes a value (by default as everywhere)."""

    setting: str
    read: Callable[[str], Any] = str
    only_on: str | None = None  # the device without which the variable says nothing


COUNTERPARTS = {
    "FORWARDED_ALLOW_IPS": Counterpart("forwarded_allow_ips"),  # uvicorn's own, which works with vLLM too
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
}
FIXED = {
    "VLLM_USE_V1": ("1", "only the V1 engine is built"),
    "VLLM_WORKER_MULTIPROC_METHOD": ("spawn", "the engine process is always started afresh"),
}
"""Variable -> the one value that it can have here, and why."""
READ_BY_FEATURES = {"VLLM_PP_LAYER_PARTITION", "STAGES_NODE_SECRET", "STAGES_PARTS", "STAGES_PLUGINS"}
"""Variables that stand for no setting: a feature reads them."""
NOTHING_TO_DO = {"VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "VLLM_USAGE_SOURCE"}  # nobody is told of anybody's usage
SERVER_SETTINGS = (
    "host", "port", "served_model_name", "chat_template", "response_role", "engine", "in_process", "shutdown_timeout",
)  # fmt: skip
"""Settings of the stages above, which no other command than theirs knows."""


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
    """Shall `LLM` put its engine into a process of its own? Only if VLLM_ENABLE_V1_MULTIPROCESSING says so. (In vLLM that is
    the default.) Raises ConfigError."""
    return value_of("VLLM_ENABLE_V1_MULTIPROCESSING") is False


def check_fixed(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that asks for what can never be here."""
    for variable, (only, why) in FIXED.items():
        value = environ.get(variable, "").strip()
        if value not in ("", only):
            raise ConfigError(f"environment variable {variable}: {value!r} is not possible (only {only} is): {why}")


def unread_variables(environ: Mapping[str, str], settings: set[str]) -> list[str]:
    """The variables of vLLM and of this project that are set and that nothing reads. `settings` are the names of those that the
    command knows; those of other commands count too."""
    settings = settings | feature_settings() | set(SERVER_SETTINGS)
    known = FIXED.keys() | READ_BY_FEATURES | NOTHING_TO_DO
    known |= {name for name, counterpart in COUNTERPARTS.items() if counterpart.setting in settings}
    known |= {"STAGES_" + name.upper() for name in settings}
    ours = COUNTERPARTS.keys() | {name for name in environ if name.startswith(("VLLM_", "STAGES_"))}
    return sorted(name for name in ours - known if environ.get(name))


def feature_settings() -> set[str]:
    """The names of all settings of features, of whatever stage."""
    from stage03_engine.plugins import features

    kinds = (kind for feature in features() for kind in feature.settings.values() if is_dataclass(kind))
    inner = (section for kind in kinds for section in (kind, *(type(each.default) for each in fields(kind))))
    return {each.name for section in inner if is_dataclass(section) for each in fields(section)}


def check_variables(environ: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Name the variables that nothing reads in one warning. Raises ConfigError instead with --fail-on-environ-validation, and if one may
    belong to a feature that is not installed: a key in a variable that nothing reads must not open the server.

    `settings` maps the names of those that the command knows to what is known of them.
    """
    if not any(name.startswith(("VLLM_", "STAGES_")) or name in COUNTERPARTS for name in environ):
        return
    unread = unread_variables(environ, set(settings))
    if not unread:
        return
    refuse_absent(f"environment variable {unread[0]}")
    said = f"set, but nothing here reads {'it' if len(unread) == 1 else 'them'}: {', '.join(unread)}"
    strict = settings.get("fail_on_environ_validation")
    if strict is not None and strict.value:
        raise ConfigError(f"environment variables that are {said}")
    logger.warning("Environment variables that are %s", said)
