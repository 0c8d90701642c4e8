"""Which settings are impossible, alone or together (vllm/config, VllmConfig.__post_init__). A feature's manifest checks its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from stage03_engine.args.fields import check_at_least
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import each
from stage03_engine.plugins import HOOKS, check_hooks, features
from stage04_kernels.attention import resolve_backend


def check_config(config: VllmConfig) -> None:
    """Raises ConfigError for the first setting that is impossible, alone or together with another."""
    _check_ranges(config)
    check_conflicts([getattr(config, name) for name in SECTIONS], "stage03_engine")
    _check_attention_backend(config)
    _check_lengths(config)
    for check in each(VllmConfig, "check"):
        check(config)
    for hooks in each(VllmConfig, "hooks"):
        check_hooks(hooks.__qualname__, hooks(config), "settings")
    for seam, hook in HOOKS.items():
        if hook.single:
            config.claim(seam)


def check_one_engine(config: VllmConfig, who: str) -> None:
    """Raises ConfigError if the settings ask for several engines, which `who` does not start."""
    if config.hooks("client"):
        raise ConfigError(
            f"{who} has one engine: leave data_parallel_size and data_parallel_rank out, or use `stages serve`, which starts several"
        )


def _check_ranges(config: VllmConfig) -> None:
    for name in SECTIONS:
        check_at_least(getattr(config, name))
    share = config.cache_config.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {share}")


def check_conflicts(sections: Iterable[Any], stage: str) -> None:
    """Raises ConfigError for what features of `stage` and below declare. A setting is given if it differs from its default."""
    sections = list(sections)
    given = {option.name for own in sections for option in fields(own) if getattr(own, option.name) != option.default}
    for feature in features(stage):
        for (one, other), why in feature.conflicts.items():
            if {one, other} <= given:
                raise ConfigError(f"{one} cannot be combined with {other}: {why}; leave out one of the two")


def _check_attention_backend(config: VllmConfig) -> None:
    name, device = config.device_config.attention_backend, config.device_config.device
    try:
        resolved = resolve_backend(name, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if resolved == "triton" and device != "cuda":
        raise ConfigError("attention_backend triton needs a GPU; triton-interpret runs the same kernels without one")
    if resolved in ("native", "triton-interpret") and device != "cpu":
        raise ConfigError(f"attention_backend {resolved} needs --device cpu, not {device}")


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
