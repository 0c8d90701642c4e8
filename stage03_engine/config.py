"""The configuration of one engine: frozen dataclasses, from which the command line flags are derived.

A field's `metadata` holds what its flag needs: `help`, and where they apply `choices`, `aliases` and `at_least`. Each field is declared
once: here, or in the manifest of its feature. Nothing here imports torch. Source: vllm/config (ModelConfig, ..., VllmConfig).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from stage03_engine.args.fields import internal as internal, option as option, own_first
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import each, load
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import Section, keys, with_features

LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")


@with_features
@dataclass(frozen=True)
class ModelConfig(Section):
    """Which model, in which number format, with which context."""

    model: str = option(
        "gpt2-tiny", "model to serve: a bundled name (gpt2-tiny), a Hugging Face id (gpt2), or a folder"
    )
    tokenizer: str | None = option(None, "folder or id of the tokenizer, if it is not the model's own")
    dtype: str = option(
        "auto",
        "number format of weights and KV cache; auto = on a CPU float32, or bfloat16 if it has AMX or AVX512-BF16 and the float32 "
        "weights exceed 128 MiB; on a GPU the model's own, or bfloat16 if that is float32 (float16 without it); half = float16, float = float32",
        DTYPES,
    )
    max_model_len: int | None = option(None, "longest prompt plus output in tokens; detected if not given", at_least=1)
    load_format: str = option(
        "auto",
        "; ".join(["auto = safetensors", *(f"{name} = {part.help}" for name, part in keys("weights").items())]),
        ("auto", "safetensors", *keys("weights")),
    )
    seed: int = option(0, "seed of the engine: random weights, and sampling of requests without a seed of their own")
    default_sampling_params: dict[str, Any] | None = internal(None)  # of requests that leave them out
    model_path: str | None = internal(None)  # resolved folder; None for dummy weights of a known shape
    tokenizer_path: str | None = internal(None)  # resolved folder; None = the byte-level stand-in for dummy weights
    shape: ModelShape | None = internal(None)


@with_features
@dataclass(frozen=True)
class CacheConfig(Section):
    """The paged KV cache."""

    block_size: int = option(16, "tokens per KV-cache block", at_least=1)
    gpu_memory_utilization: float = option(
        0.9,
        "share of the device's memory that weights, activations and KV cache may use",
        aliases=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: int | None = option(None, "KV cache in bytes, instead of measuring free memory", at_least=1)
    num_gpu_blocks_override: int | None = option(
        None, "number of KV-cache blocks, instead of measuring free memory", at_least=2
    )
    enable_prefix_caching: bool = option(True, "reuse the blocks of earlier requests that began with the same tokens")
    prefix_caching_hash_seed: str | None = option(
        None, "text that the hashes of cached blocks begin with; random if not given, so that nobody can predict them"
    )
    block_pool_cls: str | None = option(None, "module:Class to use instead of stage03_engine.core.block_pool:BlockPool")
    block_hash_lookahead: int = internal(0)  # tokens after a block that what lies in it depends on too


@with_features
@dataclass(frozen=True)
class SchedulerConfig(Section):
    """How much one engine step may do."""

    max_num_seqs: int = option(256, "maximum number of requests in one step", at_least=1)
    max_num_batched_tokens: int = option(2048, "token budget of one step", at_least=1)
    enable_chunked_prefill: bool = option(True, "split a prompt over several steps when it does not fit the budget")
    long_prefill_token_threshold: int = option(
        0,
        "maximum number of tokens that one request gets in a step while there are others, so that a long prompt leaves room; 0 = off",
        at_least=0,
    )
    stream_interval: int = option(
        1,
        "tokens from one chunk of a stream to the next, the first comes at once; more means fewer, larger chunks",
        at_least=1,
    )
    scheduling_policy: str = option(
        "fcfs",
        "who goes first: by arrival, by the request's priority, or each API key, and its HTTP requests, in turn",
        ("fcfs", "priority", "fair"),
    )
    scheduler_cls: str | None = option(None, "module:Class to use instead of stage03_engine.core.scheduler:Scheduler")


@with_features
@dataclass(frozen=True)
class DeviceConfig(Section):
    """Where the model runs."""

    device: str = option("auto", "device to run on", ("auto", "cpu", "cuda"))
    attention_backend: str = option(
        "auto",
        "paged attention: auto, native (compiled for this CPU), torch, triton (GPU), triton-interpret (the same without one, "
        "slow), batch_invariant, reference, or module:function of your own",
    )
    num_threads: int | None = option(
        None,
        "compute threads of the engine process on CPU; detected: one per physical core, within affinity, quota and OMP_NUM_THREADS",
        at_least=1,
    )


@with_features
@dataclass(frozen=True)
class ObservabilityConfig(Section):
    """What the engine shows to the outside."""

    log_level: str | None = option(
        None,
        "least level of our own lines in the log: INFO for a server, WARNING for other commands (vLLM: VLLM_LOGGING_LEVEL)",
        LOG_LEVELS,
    )
    fail_on_environ_validation: bool = option(
        False, "refuse a variable VLLM_* or STAGES_* that nothing reads, instead of a warning"
    )
    disable_log_stats: bool = option(False, "no periodic line with throughput and queue lengths")


@with_features
@dataclass(frozen=True)
class VllmConfig(Section):
    """Everything that the front end and the engine core share; sent in the handshake as msgpack.

    A feature's mixin adds its own sections as fields, and may define any of these methods:

    - `detect(values)`, static: name -> (value, what decided), for settings that were left open; `values` has the model's `shape` too
    - `resolve(values, files)`, static: internal fields computed from the settings and the model's files
    - `check(config)`, static: raises ConfigError if the settings are impossible together
    - `tasks(config)`, static: what requests may ask for, if the feature changes it
    - `kv_per_token(config)`, static: how many numbers its own keys and values of a token are, in the KV cache's blocks
    - `memory_rows(config)`, `start_rows(config)`, `of_later_engine(config)`, static: its rows of the plan of a start; the settings of an engine that joins others
    - `hooks(config)`, static: seam, of `plugins.HOOKS`, -> "module:Class" of what takes part there
    """

    model_config: ModelConfig = ModelConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    device_config: DeviceConfig = DeviceConfig()
    observability_config: ObservabilityConfig = ObservabilityConfig()

    @property
    def max_model_len(self) -> int:
        """The resolved context length in tokens."""
        assert self.model_config.max_model_len is not None, "config is not resolved"
        return self.model_config.max_model_len

    @property
    def shape(self) -> ModelShape:
        """The resolved model shape."""
        assert self.model_config.shape is not None, "config is not resolved"
        return self.model_config.shape

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What requests may ask for (vLLM: AsyncLLM.get_supported_tasks)."""
        changed = [found for tasks in each(VllmConfig, "tasks") if (found := tasks(self))]
        if len(changed) > 1:
            raise ConfigError(f"one model cannot do both: {' and '.join(map(', '.join, changed))}")
        return changed[0] if changed else ("generate",)

    def hooks(self, seam: str) -> list[str]:
        """The hooks ("module:Class") that the settings switch on at `seam`, which `hooks` above lists."""
        return [name for hooks in each(VllmConfig, "hooks") for name in hooks(self).get(seam, [])]

    def chosen(self, seam: str, default: Any) -> Any:
        """The one holder of a place: the hook at `seam`, loaded, or the walk's own `default`. Raises ConfigError if several features
        claim the place."""
        name = self.claim(seam)
        return default if name is None else load(name)

    def claim(self, seam: str) -> str | None:
        """The hook at a seam where there is room for one. Raises ConfigError if several features want to be there."""
        claimed = self.hooks(seam)
        if len(claimed) > 1:
            raise ConfigError(f"these settings cannot be combined: {' and '.join(claimed)} both want to be the {seam}")
        return claimed[0] if claimed else None

    def hash(self) -> str:
        """12 hex digits that change with every setting that can change the work (vLLM: VllmConfig.compute_hash)."""
        silent = replace(self, observability_config=ObservabilityConfig())
        return hashlib.sha256(msgspec.msgpack.encode(silent)).hexdigest()[:12]


SECTIONS: dict[str, type] = {field.name: type(field.default) for field in own_first(VllmConfig)}
"""Field name in VllmConfig -> section class, the walk's own before those of features."""
_names = [field.name for section in SECTIONS.values() for field in fields(section)]
if twice := {name for name in _names if _names.count(name) > 1}:
    raise ConfigError(f"two features have a setting {min(twice)}: delete one of them")
