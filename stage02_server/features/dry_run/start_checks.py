"""What a start would refuse, found without one: for `serve --dry-run`. Imports no torch, and opens nothing.

What only the device or the moment knows is left to the start: whether a port is free, whether a kernel compiles.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from stage02_server.cli_args import FrontendArgs
from stage03_engine.args.check import check_one_engine
from stage03_engine.args.resolve import Resolved, detect_device
from stage03_engine.config import VllmConfig
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.tokenizer import get_tokenizer
from stage03_engine.mixins import is_there, load
from stage03_engine.plugins import wanted
from stagetrace import trace

NEEDS = {"triton": "triton", "triton-interpret": "triton"}  # attention backend -> its package
ABOUT_THE_APP = (
    "chat_template", "default_chat_template_kwargs", "middleware", "tool_call_parser", "tool_parser_plugin",
    "reasoning_parser", "reasoning_parser_plugin", "enable_auto_tool_choice",
)  # fmt: skip
SWAP_BLOCKS = "stage03_engine.core.features.swap_space.swap_space:num_swap_blocks"
ECHO_ENGINE = "stage02_server.features.echo_engine.echo_engine"
WITH_FRONT_ENDS = "stage02_server.features.api_servers.launch:with_front_ends"


def has_a_model(settings: Mapping[str, Resolved]) -> bool:
    """False for the echo engine."""
    return "engine" not in settings or settings["engine"].value == "core"


def check_start(config: VllmConfig, settings: Mapping[str, Resolved]) -> None:
    """Raises the StagesError of the start. Ends the recording of the trace: what is tried here is no part of it."""
    trace.close()
    _check_number_of_engines(config, settings)
    if has_a_model(settings):
        _check_device(config)
    _check_scheduler(config)
    for path in getattr(config.model_config, "logits_processors", None) or ():  # not imported: it needs torch
        wanted("engine", "check_module", "a logits processor of your own")(path, "--logits-processors")
    _check_profiler_dir(getattr(config.observability_config, "profiler_dir", None))
    uds = settings["uds"].value if "uds" in settings else None
    if uds and not Path(uds).absolute().parent.is_dir():
        raise ConfigError(f"cannot listen on {uds}: No such file or directory; see --uds")
    path = config.model_config.tokenizer_path
    template = get_tokenizer(path).chat_template if path is not None else None
    if (template or any(settings[name].value for name in ABOUT_THE_APP if name in settings)) and is_there(ECHO_ENGINE):
        _check_app(config, _frontend_args(settings))


def _check_number_of_engines(config: VllmConfig, settings: Mapping[str, Resolved]) -> None:
    """What works with one engine, or with engines that the server starts itself."""
    for name, value, who in (("in_process", True, "--in-process"), ("engine", "echo", "--engine echo")):
        if name in settings and settings[name].value == value:
            check_one_engine(config, who)
    if "api_server_count" in settings and (settings["api_server_count"].value or 1) > 1:
        load(WITH_FRONT_ENDS)(config, _frontend_args(settings))


def _frontend_args(settings: Mapping[str, Resolved]) -> FrontendArgs:
    return FrontendArgs(**{each.name: settings[each.name].value for each in fields(FrontendArgs)})


def _check_device(config: VllmConfig) -> None:
    device, backend = config.device_config.device, config.device_config.attention_backend
    found, why = detect_device()
    if device == "cuda" and found != "cuda":
        raise ConfigError(f"--device cuda: there is no usable GPU ({why}); use --device cpu")
    if backend in NEEDS and find_spec(NEEDS[backend]) is None:
        raise ConfigError(f"the attention backend {backend} needs {NEEDS[backend]}, which is not installed")
    if ":" in backend and not _module_is_there(backend):
        raise ConfigError(
            f"the attention backend {backend} cannot be loaded: there is no module {backend.partition(':')[0]}"
        )


def _check_scheduler(config: VllmConfig) -> None:
    """Make the scheduler and the block pool of one's own, for one request; and see that swapped blocks have room."""
    cache, scheduling = config.cache_config, config.scheduler_config
    if cache.block_pool_cls is not None or scheduling.scheduler_cls is not None:
        num_blocks = cdiv(config.max_model_len, cache.block_size) + 1
        wanted("engine", "own_scheduler", "a scheduler or a block pool of your own")(config, num_blocks, b"")
    if getattr(scheduling, "preemption_mode", None) == "swap":
        load(SWAP_BLOCKS)(config)


def _check_profiler_dir(name: str | None) -> None:
    """Could the engine make the folder, or write to it?"""
    if name is None:
        return
    path = Path(name).absolute()
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    problem = None if there.is_dir() else errno.EEXIST if there == path else errno.ENOTDIR
    if problem is None and not os.access(there, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise ConfigError(f"cannot write profiles to {name!r}: {os.strerror(problem)}; see --profiler-dir")


def _module_is_there(path: str) -> bool:
    """Is there the module of `module:name`?"""
    module = path.partition(":")[0]
    return bool(module) and is_there(module)


def _check_app(config: VllmConfig, args: FrontendArgs) -> None:
    """Build the application as the start does, on an engine without a model."""
    from prometheus_client import CollectorRegistry

    from stage02_server.api_server import build_app, init_app_state
    from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
    from stage03_engine.frontend.async_llm import AsyncLLM

    engine = AsyncLLM(config, EchoCoreClient(config), [])
    init_app_state(engine, build_app(args), args, CollectorRegistry())
