"""Flags and keyword arguments become a VllmConfig (vllm/engine/arg_utils.py, EngineArgs and AsyncEngineArgs)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stage03_engine.args.fields import Setting, add_flags, settings_of
from stage03_engine.args.generation import default_sampling_params
from stage03_engine.args.parser import FlexibleArgumentParser, did_you_mean, refuse_absent
from stage03_engine.args.resolve import (
    Resolved,
    available_cores,
    detect_device,
    resolve_cli,
    resolve_settings,
    with_detected,
)
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import each
from stage03_engine.model_path import ModelFiles, resolve_model
from stage03_engine.tracing import event_filter
from stage04_kernels.attention import resolve_backend
from stagetrace import trace
from stagetrace.redact import redact_values

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def engine_settings() -> list[Setting]:
    """The settings of all sections of VllmConfig, in order."""
    return [setting for section in SECTIONS.values() for setting in settings_of(section)]


@dataclass(frozen=True)
class EngineArgs:
    """Every setting of the engine with its source, before the model is looked for.

    `settings` maps each field name of SECTIONS to its Resolved. It may hold more (those of the HTTP server): they are
    left alone.
    """

    settings: dict[str, Resolved]

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> None:
        """Add `--config` and one flag per engine setting."""
        parser.add_argument("--config", metavar="FILE", help="YAML file with settings, one `name: value` per line")
        for section in SECTIONS.values():
            add_flags(parser, section)
        parser.refuse("engine")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> EngineArgs:
        """From a command line that was parsed with `add_cli_args`, and perhaps a positional `model_tag`.

        Raises ConfigError.
        """
        return cls(resolve_cli(engine_settings(), args, environ, ["engine"]))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> VllmConfig:
        """The configuration for a caller in Python: `from_kwargs(model="gpt2-tiny", block_size=8)`.

        A keyword has the rank of a command line flag; STAGES_* variables count for what is not given.
        Raises ConfigError, also for an unknown keyword, and ModelNotFoundError.
        """
        settings = engine_settings()
        known = [setting.name for setting in settings]
        for name in kwargs:
            if name not in known:
                refuse_absent("--" + name.replace("_", "-"))
                raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, known)}")
        config, _ = cls(resolve_settings(settings, kwargs)).create_engine_config()
        return config

    def create_engine_config(self) -> tuple[VllmConfig, dict[str, Resolved]]:
        """Find the model, fill in what can be detected, check the whole.

        Returns the configuration and the settings as they now stand, sources included. Raises ModelNotFoundError, or
        ConfigError when a setting is impossible, alone or together with another.
        """
        asked = self.settings["model"]
        files = resolve_model(asked.value, self.settings["load_format"].value, self.settings["tokenizer"].value)
        settings = self.settings
        if files.name != asked.value:
            alias = Resolved(files.name, asked.source, f"{asked.detail}, alias {asked.value}")
            settings = settings | {"model": alias}
        dtype = settings["dtype"]
        if dtype.value in _DTYPE_ALIASES:
            alias = Resolved(_DTYPE_ALIASES[dtype.value], dtype.source, f"{dtype.detail}, alias {dtype.value}")
            settings = settings | {"dtype": alias}
        settings = with_detected(settings, _detect(files, settings["device"].value))
        for detect in each(VllmConfig, "detect"):
            settings = with_detected(settings, detect(_values(settings)))
        device = settings["device"].value
        settings = with_detected(
            settings, {"attention_backend": (resolve_backend("auto", device), f"device is {device}")}
        )
        config = _build(settings, files)
        check_config(config)
        if trace.on:
            given = {
                name: f"{each.value} from {each.origin}" for name, each in settings.items() if each.source != "default"
            }
            trace.emit("config.resolved", settings=redact_values(given), defaults=len(settings) - len(given))
        return config, settings


AsyncEngineArgs = EngineArgs
"""vLLM's AsyncEngineArgs adds flags for the logging of requests; here both take the same."""


def _detect(files: ModelFiles, device: str) -> dict[str, tuple[Any, str]]:
    """Setting -> (value, what was looked at), for what may be left open."""
    shape, (found_device, why) = files.shape, detect_device()
    if device == "auto":
        device = found_device
    cores = available_cores()
    positions = "n_positions" if shape.architecture.startswith("GPT2") else "max_position_embeddings"
    return {
        "device": (found_device, why),
        "dtype": ("float32", "device is cpu") if device == "cpu" else (shape.torch_dtype, "the model's own"),
        "max_model_len": (shape.max_position_embeddings, f"{positions} of the model"),
        # One core stays free for the API server and the client: compute threads on all cores would starve them.
        "num_threads": (max(1, cores - 1), f"{cores} cores"),
    }


def _values(settings: Mapping[str, Resolved]) -> dict[str, Any]:
    return {name: each.value for name, each in settings.items()}


def _build(settings: Mapping[str, Resolved], files: ModelFiles) -> VllmConfig:
    values = _values(settings)
    values |= {"model_path": files.model_path, "tokenizer_path": files.tokenizer_path, "shape": files.shape}
    for resolve in each(VllmConfig, "resolve"):
        values |= resolve(values, files)
    sampling = default_sampling_params(
        values["generation_config"], files.model_path, values["override_generation_config"]
    )
    limit = sampling.get("max_tokens")
    if limit is not None and limit >= values["max_model_len"]:  # the context is the limit already
        del sampling["max_tokens"]
    values["default_sampling_params"] = sampling
    sections = {}
    for name, section in SECTIONS.items():
        own = {field.name for field in fields(section)}
        sections[name] = section(**{name: value for name, value in values.items() if name in own})
    return VllmConfig(**sections)


def check_config(config: VllmConfig) -> None:
    """Raise ConfigError for the first setting that is impossible, alone or together with another."""
    _check_ranges(config)
    _check_parallel(config)
    _check_attention_backend(config)
    _check_lengths(config)
    for check in each(VllmConfig, "check"):
        check(config)
    event_filter(config.observability_config)


def _check_ranges(config: VllmConfig) -> None:
    for name, section in SECTIONS.items():
        for setting in settings_of(section):
            value = getattr(getattr(config, name), setting.name)
            if setting.at_least is not None and value is not None and value < setting.at_least:
                raise ConfigError(f"{setting.name} must be at least {setting.at_least}, not {value}")
    share = config.cache_config.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {share}")


def _check_attention_backend(config: VllmConfig) -> None:
    name, device = config.device_config.attention_backend, config.device_config.device
    try:
        resolved = resolve_backend(name, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if resolved == "triton" and device != "cuda":
        raise ConfigError("attention_backend triton needs a GPU; triton-interpret runs the same kernels without one")
    if resolved in ("cpu", "triton-interpret") and device != "cpu":
        raise ConfigError(f"attention_backend {resolved} needs --device cpu, not {device}")


def _check_parallel(config: VllmConfig) -> None:
    for field in fields(config.parallel_config):
        size = getattr(config.parallel_config, field.name)
        if size > 1:
            raise ConfigError(f"{field.name} = {size} is not built yet; only 1 is")


def _check_lengths(config: VllmConfig) -> None:
    scheduler, positions = config.scheduler_config, config.shape.max_position_embeddings
    if config.max_model_len > positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's {positions} positions; "
            f"give at most {positions}"
        )
    budget = scheduler.max_num_batched_tokens
    if budget < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {budget} is less than max_num_seqs {scheduler.max_num_seqs}: a step could not give "
            "each request one token; raise the first or lower the second"
        )
    if not scheduler.enable_chunked_prefill and scheduler.long_prefill_token_threshold:
        raise ConfigError(
            "long_prefill_token_threshold splits prompts, but chunked prefill is off; give one of the two"
        )
    if not scheduler.enable_chunked_prefill and budget < config.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens {budget} is less than max_model_len {config.max_model_len} and chunked prefill is "
            "off: a long prompt could never run; raise the first, lower the second, or enable chunked prefill"
        )
