"""Flags and keyword arguments become a VllmConfig (vllm/engine/arg_utils.py, EngineArgs and AsyncEngineArgs)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stage03_engine.args.detect import available_cores, detect_device
from stage03_engine.args.fields import Setting, add_flags, settings_of
from stage03_engine.args.generation import default_sampling_params
from stage03_engine.args.not_built import ENGINE_FLAGS, add_not_built
from stage03_engine.args.parser import did_you_mean
from stage03_engine.args.pooler import parse_pooling
from stage03_engine.args.resolve import Resolved, resolve_cli, resolve_settings, with_detected
from stage03_engine.args.speculative import parse_speculative_config
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import classifier_shape
from stage03_engine.model_path import ModelFiles, resolve_model
from stage03_engine.tracing import event_filter
from stage04_kernels.backend_names import resolve_backend
from stagetrace import trace
from stagetrace.redact import redact_values
from stagetrace.writer import MIN_MAX_BYTES

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
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add `--config` and one flag per engine setting."""
        parser.add_argument("--config", metavar="FILE", help="YAML file with settings, one `name: value` per line")
        for section in SECTIONS.values():
            add_flags(parser, section)
        add_not_built(parser, ENGINE_FLAGS)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> EngineArgs:
        """From a command line that was parsed with `add_cli_args`, and perhaps a positional `model_tag`.

        Raises ConfigError.
        """
        return cls(resolve_cli(engine_settings(), args, environ, [ENGINE_FLAGS]))

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
        if settings["batch_invariant"].value:
            settings = with_detected(settings, {"attention_backend": ("batch_invariant", "--batch-invariant")})
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


def _build(settings: Mapping[str, Resolved], files: ModelFiles) -> VllmConfig:
    computed: dict[str, Any] = {
        "model_path": files.model_path,
        "tokenizer_path": files.tokenizer_path,
        "shape": files.shape,
    }
    computed |= parse_speculative_config(settings["speculative_config"].value)
    runner, convert, pooler = (settings[name].value for name in ("runner", "convert", "pooler_config"))
    computed |= parse_pooling(runner, convert, pooler, has_head=bool(files.shape.labels))
    if computed["convert_type"] == "classify":
        computed["shape"] = classifier_shape(files.shape, files.model_path)
    source, override = settings["generation_config"].value, settings["override_generation_config"].value
    sampling = default_sampling_params(source, files.model_path, override)
    limit = sampling.get("max_tokens")
    if limit is not None and limit >= settings["max_model_len"].value:  # the context is the limit already
        del sampling["max_tokens"]
    computed["default_sampling_params"] = sampling
    sections = {}
    for name, section in SECTIONS.items():
        values = {f.name: settings[f.name].value if f.name in settings else computed[f.name] for f in fields(section)}
        sections[name] = section(**values)
    return VllmConfig(**sections)


def check_config(config: VllmConfig) -> None:
    """Raise ConfigError for the first setting that is impossible, alone or together with another."""
    _check_ranges(config)
    _check_parallel(config)
    _check_attention_backend(config)
    _check_batch_invariant(config)
    _check_lengths(config)
    _check_pooling(config)
    event_filter(config.observability_config)


def _check_ranges(config: VllmConfig) -> None:
    cache, scheduler, grammar = config.cache_config, config.scheduler_config, config.structured_outputs_config
    at_least: list[tuple[str, int | None, int]] = [
        ("max_model_len", config.max_model_len, 1),
        ("block_size", cache.block_size, 1),
        ("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 1),
        ("num_gpu_blocks_override", cache.num_gpu_blocks_override, 2),
        ("max_num_seqs", scheduler.max_num_seqs, 1),
        ("stream_interval", scheduler.stream_interval, 1),
        ("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1),
        ("long_prefill_token_threshold", scheduler.long_prefill_token_threshold, 0),
        ("num_threads", config.device_config.num_threads, 1),
        ("grammar_cache_size", grammar.grammar_cache_size, 1),
        ("grammar_memory_bytes", grammar.grammar_memory_bytes, 1),
        ("trace_max_bytes", config.observability_config.trace_max_bytes, MIN_MAX_BYTES),
    ]
    for name, value, least in at_least:
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    if cache.swap_space < 0.0:
        raise ConfigError(f"swap_space must be at least 0, not {cache.swap_space}")
    if not 0.0 < cache.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {cache.gpu_memory_utilization}")
    for name in ("grammar_compile_seconds", "grammar_step_seconds"):
        if not 0.01 <= getattr(grammar, name) <= 3600.0:
            raise ConfigError(f"{name} must be in [0.01, 3600], not {getattr(grammar, name)}")


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


def _check_batch_invariant(config: VllmConfig) -> None:
    device = config.device_config
    if device.batch_invariant and device.attention_backend != "batch_invariant":
        raise ConfigError(
            f"batch_invariant needs attention_backend auto or batch_invariant, not {device.attention_backend}: the "
            "arithmetic of the others depends on the batch"
        )


def _check_parallel(config: VllmConfig) -> None:
    for field in fields(config.parallel_config):
        size = getattr(config.parallel_config, field.name)
        if size < 1:
            raise ConfigError(f"{field.name} must be at least 1, not {size}")
        if size > 1:
            raise ConfigError(f"{field.name} = {size} is not built yet; only 1 is")


def _check_pooling(config: VllmConfig) -> None:
    size, hidden_size = config.pooling_config.dimensions, config.shape.hidden_size
    if size is not None and size > hidden_size:
        raise ConfigError(f"pooler_config: dimensions {size} is more than the model's hidden size, {hidden_size}")
    if size is not None and config.is_classifier:
        raise ConfigError("pooler_config: dimensions cuts embeddings; a classifier answers with one number per class")
    if config.is_whisper and (config.is_pooling or config.speculative_config.method is not None):
        raise ConfigError(
            "a Whisper model only writes down what it hears: leave out runner, convert and speculative_config"
        )
    if config.is_pooling and config.speculative_config.method is not None:
        raise ConfigError(
            "runner pooling generates nothing, so there is nothing to speculate; leave out one of the two"
        )


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
