"""The configuration of one engine: frozen dataclasses, from which the command line flags are derived.

A field's `metadata` holds what the flag needs: `help`, and where it applies `choices`. A field is written once, here.
Source: vllm/config (ModelConfig, CacheConfig, SchedulerConfig, ..., VllmConfig). Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from stage03_engine.model_shape import ModelShape

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a command line flag; `aliases` are further names of the flag."""
    return field(default=default, metadata={"help": help, "choices": choices, "aliases": aliases})


def internal(default: Any) -> Any:
    """A dataclass field that is computed, not a flag."""
    return field(default=default, metadata={"internal": True})


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which number format, with which context."""

    model: str = option(
        "gpt2-tiny", "model to serve: a bundled name (gpt2-tiny), a Hugging Face id (gpt2), or a folder"
    )
    tokenizer: str | None = option(None, "folder or id of the tokenizer, if it is not the model's own")
    dtype: str = option(
        "auto",
        "number format of weights and KV cache; auto = float32 on CPU, the model's own on a GPU; half and float are vLLM's "
        "other names of float16 and float32",
        DTYPES,
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output in tokens; detected from the model if not given"
    )
    load_format: str = option(
        "auto", "auto = safetensors; dummy = random weights, nothing is downloaded", ("auto", "safetensors", "dummy")
    )
    seed: int = option(
        0, "seed of the engine: random weights, and sampling of requests that bring no seed of their own"
    )
    logits_processors: tuple[str, ...] | None = option(
        None,
        "module:Class of one or several logits processors of your own; see stage03_engine/core/features/logits_processor/logits_processor.py",
    )
    generation_config: str = option(
        "auto",
        "where sampling defaults come from: auto = generation_config.json of the model, vllm = nowhere, or a folder",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, 'sampling defaults that go before those, as JSON: {"temperature": 0.5, "top_k": 20}'
    )
    default_sampling_params: dict[str, Any] | None = internal(None)  # what came of the two
    model_path: str | None = internal(None)  # resolved folder; None for dummy weights of a known shape
    tokenizer_path: str | None = internal(None)  # resolved folder; None = the byte-level stand-in for dummy weights
    shape: ModelShape | None = internal(None)


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens per KV-cache block")
    gpu_memory_utilization: float = option(
        0.9,
        "share of the device's memory that weights, activations and KV cache may use",
        aliases=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache in bytes, instead of measuring free memory")
    num_gpu_blocks_override: int | None = option(None, "number of KV-cache blocks, instead of measuring free memory")
    enable_prefix_caching: bool = option(True, "reuse the blocks of earlier requests that began with the same tokens")
    prefix_caching_hash_seed: str | None = option(
        None, "text that the hashes of cached blocks begin with; random if not given, so that nobody can predict them"
    )
    swap_space: float = option(
        1.0, "GiB of CPU memory for the blocks of preempted requests, with --preemption-mode swap"
    )
    block_pool_cls: str | None = option(None, "module:Class to use instead of stage03_engine.core.block_pool:BlockPool")


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one engine step may do."""

    max_num_seqs: int = option(256, "most requests in one step")
    max_num_batched_tokens: int = option(2048, "token budget of one step")
    enable_chunked_prefill: bool = option(True, "split a prompt over several steps when it does not fit the budget")
    long_prefill_token_threshold: int = option(
        0,
        "most tokens that one request gets in a step while others are there, so that a long prompt leaves room; 0 = off",
    )
    stream_interval: int = option(
        1, "tokens from one chunk of a stream to the next, the first comes at once; more means fewer, larger chunks"
    )
    scheduling_policy: str = option(
        "fcfs", "who goes first: arrival, or the priority in the request", ("fcfs", "priority")
    )
    preemption_mode: str = option(
        "recompute", "what becomes of a preempted request's keys and values: computed again, or swapped to CPU memory",
        ("recompute", "swap"),
    )  # fmt: skip
    scheduler_cls: str | None = option(None, "module:Class to use instead of stage03_engine.core.scheduler:Scheduler")
    check_invariants: bool = option(
        False, "check after every step that no block and no request is lost or used twice (slow)"
    )


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """What a grammar that a request brings may cost. Each grammar runs in a process of its own."""

    grammar_cache_size: int = option(
        32, "most grammars at once; those that no request uses any more stay compiled until their place is needed"
    )
    grammar_compile_seconds: float = option(5.0, "CPU seconds that compiling one grammar may take")
    grammar_step_seconds: float = option(
        0.5, "CPU seconds that one grammar may take to find the tokens that may follow"
    )
    disable_any_whitespace: bool = option(
        False, "write JSON in one line: a small model may else fill its answer with spaces"
    )
    grammar_memory_bytes: int = option(512 * 1024**2, "bytes that one grammar may take (enforced on Linux)")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: guess tokens and verify several in one step. `method` None means off."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4}; off if not given',
        aliases=("-sc",),
    )
    method: str | None = internal(None)
    num_speculative_tokens: int = internal(0)
    prompt_lookup_min: int = internal(0)
    prompt_lookup_max: int = internal(0)


@dataclass(frozen=True)
class PoolingConfig:
    """Whether the engine makes text or vectors. `runner_type` "pooling": vectors; a vector may hold a number per class."""

    runner: str = option(
        "auto",
        "what the engine makes of prompts: generate = text, pooling = vectors or classes; auto = text, unless --convert or the "
        "model say otherwise",
        ("auto", "generate", "pooling", "draft"),
    )  # fmt: skip
    convert: str = option(
        "auto",
        "embed = use the hidden states of any model as embeddings; classify = use its classification head, score.weight, "
        "whatever config.json calls the model",
        ("auto", "none", "embed", "classify"),
    )  # fmt: skip
    pooler_config: dict[str, Any] | None = option(
        None,
        'how hidden states become vectors, as JSON: {"pooling_type": "MEAN", "use_activation": true, "dimensions": 64}; '
        "LAST, scaled to length 1, and all dimensions if not given",
    )
    runner_type: str = internal("generate")
    convert_type: str = internal("none")  # with runner_type "pooling": embed or classify
    pooling_type: str = internal("LAST")
    use_activation: bool = internal(True)
    dimensions: int | None = internal(None)


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs."""

    device: str = option("auto", "device to run on", ("auto", "cpu", "cuda"))
    attention_backend: str = option(
        "auto",
        "paged attention: auto, torch, cpu (compiled, for long contexts), triton (GPU), triton-interpret (the same without one, "
        "slow), batch_invariant, reference, or module:function of your own",
    )
    batch_invariant: bool = option(
        False, "tokens and logprobs that do not depend, in any bit, on what else is in the batch; slower"
    )
    enforce_eager: bool = option(
        False, "no CUDA graphs: launch each kernel of a decode step by itself (GPU only; the tokens are the same)"
    )
    num_threads: int | None = option(
        None, "compute threads of the engine process on CPU; detected: all cores but one, at least one"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How many of each part there are. Only one of each is built so far; the fields exist so that the error is clear."""

    tensor_parallel_size: int = option(1, "GPUs that share one model (only 1 is built)", aliases=("-tp",))
    pipeline_parallel_size: int = option(1, "groups of layers on different GPUs (only 1 is built)", aliases=("-pp",))
    data_parallel_size: int = option(1, "engine copies (only 1 is built)", aliases=("-dp",))


@dataclass(frozen=True)
class ObservabilityConfig:
    """What can be seen from outside."""

    trace: str | None = option(None, "folder to write trace files to, one per process")
    trace_console: bool = option(False, "print [TRACE] lines to stderr")
    trace_phases: str | None = option(None, "record only events of these phases, such as 7,8")
    trace_names: str | None = option(None, "record only events whose name matches a pattern, such as 'sched.*,kv.*'")
    trace_requests: str | None = option(
        None,
        "record only requests whose id matches a pattern, such as 'cmpl-1f0c*', with the steps that they take part in",
    )
    trace_sample: float = option(
        1.0, "share of the requests that is recorded, such as 0.01: each with all its events, or not at all"
    )
    trace_max_bytes: int | None = option(
        None, "most bytes of trace files per process: the newest events and one older file are kept"
    )
    trace_prompts: bool = option(
        False, "record what clients wrote and were answered too: prompts, outputs, token ids, stop strings"
    )
    trace_layers: bool = option(
        False, "record the embedding, and attention and MLP of each layer, as spans of their own (slow)"
    )
    profiler_dir: str | None = option(
        None, "folder for torch profiles of the engine; POST /start_profile and /stop_profile make one"
    )
    disable_log_stats: bool = option(False, "no periodic line with throughput and queue lengths")


@dataclass(frozen=True)
class VllmConfig:
    """Everything that the front end and the engine core share; sent over the handshake as msgpack."""

    model_config: ModelConfig = ModelConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    structured_outputs_config: StructuredOutputsConfig = StructuredOutputsConfig()
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    pooling_config: PoolingConfig = PoolingConfig()
    device_config: DeviceConfig = DeviceConfig()
    parallel_config: ParallelConfig = ParallelConfig()
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
    def is_pooling(self) -> bool:
        """True when requests end with vectors and not with text."""
        return self.pooling_config.runner_type == "pooling"

    @property
    def is_classifier(self) -> bool:
        """True when these vectors say what class a text belongs to."""
        return self.is_pooling and self.pooling_config.convert_type == "classify"

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What requests may ask of the model (vLLM: AsyncLLM.get_supported_tasks)."""
        if self.is_whisper:
            return ("transcription", "translation")
        if not self.is_classifier:
            return ("embed", "token_embed", "score") if self.is_pooling else ("generate",)
        # With one class its probability is a score: the model is a cross-encoder.
        return ("classify", "token_classify", *(("score",) if len(self.shape.labels) == 1 else ()))

    @property
    def is_whisper(self) -> bool:
        """True for a model that turns speech into text."""
        return self.shape.architecture == "WhisperForConditionalGeneration"

    def hash(self) -> str:
        """12 hex digits that change when a setting changes that can change the work (vLLM: VllmConfig.compute_hash)."""
        silent = replace(self, observability_config=ObservabilityConfig())
        return hashlib.sha256(msgspec.msgpack.encode(silent)).hexdigest()[:12]


SECTIONS: dict[str, type] = {
    "model_config": ModelConfig,
    "cache_config": CacheConfig,
    "scheduler_config": SchedulerConfig,
    "structured_outputs_config": StructuredOutputsConfig,
    "speculative_config": SpeculativeConfig,
    "pooling_config": PoolingConfig,
    "device_config": DeviceConfig,
    "parallel_config": ParallelConfig,
    "observability_config": ObservabilityConfig,
}
"""Field name in VllmConfig -> section class."""
