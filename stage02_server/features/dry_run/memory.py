"""How much memory a start would take, computed without torch: for `serve --dry-run`.

vLLM measures this when it starts (v1/worker/gpu_worker.py determine_available_memory). The weights and the KV cache are exact
here; the activations are an estimate.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.kv_cache_size import choose_num_blocks, item_bytes, kv_block_bytes
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import each, load
from stage03_engine.model_path import weight_files, weight_format
from stage03_engine.model_shape import ModelShape

MIB, GIB = 1 << 20, 1 << 30
QUANTIZED_BYTES = "stage03_engine.core.features.quantization.size:quantized_bytes"
PACKED_BYTES = "stage03_engine.core.features.quantized_checkpoints.size:packed_bytes"
_DRAFT_CONFIG = "stage03_engine.core.features.spec_decode.draft_model_config:draft_config"
_WORKER_ROWS = "stage02_server.features.dry_run.workers:rows"
_NO_PARAMETER = re.compile(r"(^|\.)attn\.(masked_)?bias$|\.inv_freq$")  # masks and tables that are computed, not loaded


@dataclass(frozen=True)
class Memory:
    """Bytes of a start; `available` is what the flags let the engine have on its device, None if only the device knows."""

    num_parameters: int
    draft_parameters: int  # of a second model that drafts
    weights: int
    per_token: int
    per_request: int  # of full length
    for_all: int  # max_num_seqs of them
    activations: int
    step_tokens: int
    available: int | None
    others: int  # what features keep on the device from the start

    @property
    def sum(self) -> int:
        """With all requests at full length."""
        return self.weights + self.for_all + self.activations + self.others


def estimate_memory(config: VllmConfig) -> Memory:
    """Raises ModelNotFoundError and ConfigError for weights that cannot be read."""
    size, scheduler = item_bytes(config), config.scheduler_config
    parameters, draft = count_parameters(config), count_draft_parameters(config)
    block, block_size = kv_block_bytes(config), config.cache_config.block_size
    per_request = block * math.ceil(config.max_model_len / block_size)
    tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * config.max_model_len)
    return Memory(
        parameters, draft, _weights(config, parameters, size) + draft * size, block // block_size, per_request, per_request * scheduler.max_num_seqs,
        _activations(config.shape, tokens, min(tokens, scheduler.max_num_seqs), size), tokens, _available(config),
        sum(size for _, size, _, on_device in rows_of_features(config) if on_device),
    )  # fmt: skip


def _weights(config: VllmConfig, parameters: int, size: int) -> int:
    """Bytes of the weights."""
    method, own = quantization(config), checkpoint_quantization(config)
    less = load(QUANTIZED_BYTES)(config.shape, size, method) if method else 0
    if own is not None and getattr(getattr(config, "parallel_config", None), "world_size", 1) == 1:
        less = load(PACKED_BYTES)(_checkpoint(config), own, _is_gpt2(config.shape), size)
    return int(parameters * size + less)


def quantization(config: VllmConfig) -> str | None:
    """The format that matrices are given while they are loaded, if it is not that of the other weights."""
    return None if checkpoint_quantization(config) else getattr(config.model_config, "quantization", None)


def checkpoint_quantization(config: VllmConfig) -> dict[str, Any] | None:
    """What config.json says about a checkpoint that is quantized."""
    return getattr(config.model_config, "checkpoint_quantization", None)


def rows_of_features(config: VllmConfig) -> list[tuple[str, int, str, bool]]:
    """(name, bytes, how it is made up, is it on the device) of what features take besides."""
    return [row for more in each(VllmConfig, "memory_rows") for row in more(config)]


def check_kv_cache(config: VllmConfig, memory: Memory) -> None:
    """Raises ConfigError if the KV cache would not hold one request of full length, or is larger than the machine's memory."""
    cache = config.cache_config
    if cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None and memory.available is None:
        return
    left = max(0, (memory.available or 0) - memory.weights - memory.activations - memory.others)
    choose_num_blocks(config, kv_block_bytes(config), lambda: left)


def count_parameters(config: VllmConfig) -> int:
    """From the heads of the safetensors files, or from the model's shape. Raises ModelNotFoundError, ConfigError."""
    model = config.model_config
    if weight_format(model.load_format) is not None or model.model_path is None or checkpoint_quantization(config):
        return _parameters_of(config.shape)
    tied = getattr(config.shape, "tie_word_embeddings", True)
    return sum(
        math.prod(shape)
        for name, shape in _checkpoint(config).items()
        if not _NO_PARAMETER.search(name) and not (tied and name == "lm_head.weight")
    )


def count_draft_parameters(config: VllmConfig) -> int:
    """Of the model that drafts; 0 without one. Raises as `count_parameters` does."""
    drafts = getattr(getattr(config, "speculative_config", None), "method", None) == "draft_model"
    drafts = drafts and not getattr(config.model_config, "logits_processors", None)  # with them nothing drafts
    return count_parameters(load(_DRAFT_CONFIG)(config)) if drafts else 0


def _checkpoint(config: VllmConfig) -> dict[str, list[int]]:
    """Name -> shape, of all files. Raises ModelNotFoundError, ConfigError."""
    folder = Path(config.model_config.model_path or "")
    return {name: shape for file in weight_files(folder) for name, shape in _tensors(file).items()}


def _tensors(file: Path) -> dict[str, list[int]]:
    """Name -> shape, from the file's head: its length in 8 bytes, then JSON."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > file.stat().st_size:
                raise ValueError("it is cut off")
            head = json.loads(opened.read(length))
        return {name: entry["shape"] for name, entry in head.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"cannot read the weights in {file}: {error}") from error


def _parameters_of(shape: ModelShape) -> int:
    """Embeddings, layers, and the norm at the end; for GPT-2 and the Llama family."""
    matrices = 1 if getattr(shape, "tie_word_embeddings", True) else 2
    embeddings = matrices * shape.vocab_size * shape.hidden_size + position_parameters(shape)
    return embeddings + shape.num_layers * layer_parameters(shape) + norm_parameters(shape)


def position_parameters(shape: ModelShape) -> int:
    """GPT-2 learns its positions; the Llama family computes them."""
    return shape.max_position_embeddings * shape.hidden_size if _is_gpt2(shape) else 0


def norm_parameters(shape: ModelShape) -> int:
    """Of one norm."""
    return (2 if _is_gpt2(shape) else 1) * shape.hidden_size


def layer_parameters(shape: ModelShape) -> int:
    """Attention, MLP, and their norms. `shape` may be a worker's part of a model."""
    gpt2 = _is_gpt2(shape)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    attention += (queries + 2 * keys) * (gpt2 or shape.attention_bias) + hidden * (gpt2 or shape.attention_output_bias)
    attention += 2 * shape.head_dim * getattr(shape, "qk_norm", False)
    mlp = 2 * hidden * inner + inner + hidden if gpt2 else 3 * hidden * inner
    return attention + mlp + 2 * norm_parameters(shape)


def _is_gpt2(shape: ModelShape) -> bool:
    return shape.architecture.startswith("GPT2")


def _activations(shape: ModelShape, tokens: int, rows: int, size: int) -> int:
    """The widest moment of a step: a layer's states on both sides of its MLP, or the sampler's copies of the logits."""
    layer = tokens * (4 * shape.hidden_size + 2 * shape.intermediate_size) * size
    sampler = rows * shape.vocab_size * 4 * 3  # float32
    return max(layer, sampler)


def _available(config: VllmConfig) -> int | None:
    if config.device_config.device != "cpu":
        return None
    import psutil

    machine = psutil.virtual_memory()
    return min(int(machine.total * config.cache_config.gpu_memory_utilization), machine.available)


def shown(count: int) -> str:
    """Bytes for people."""
    if count < MIB:
        return f"{count / 1024:.1f} KiB"
    return f"{count / MIB:.1f} MiB" if count < GIB else f"{count / GIB:.2f} GiB"


def rows(config: VllmConfig, memory: Memory) -> list[tuple[str, str, str]]:
    """(name, size, how it is made up) for the table."""
    model, scheduler = config.model_config, config.scheduler_config
    own, method = checkpoint_quantization(config), quantization(config)
    if own is not None:
        format_ = f"{model.dtype}, from a checkpoint in {own['quant_method']}"
    else:
        format_ = f"{model.dtype}, matrices in {method.partition('_')[0]}" if method else model.dtype
    weights, layers = f"{memory.num_parameters:,} parameters in {format_}", f"{config.shape.num_layers} layers"
    if memory.draft_parameters:
        weights += f", and {memory.draft_parameters:,} of the draft"
    if sum(more(config) for more in each(VllmConfig, "kv_per_token")):
        layers += ", and the draft's"
    found = [
        ("weights", shown(memory.weights), weights),
        ("kv_cache_per_token", shown(memory.per_token), f"keys and values of {layers}"),
        ("kv_cache_per_request", shown(memory.per_request), f"of {config.max_model_len} tokens (max_model_len)"),
        ("kv_cache_for_all", shown(memory.for_all), f"{scheduler.max_num_seqs} of them (max_num_seqs)"),
        ("activations", shown(memory.activations), f"about, of a step of {memory.step_tokens} tokens"),
        *((name, shown(size), how) for name, size, how, _ in rows_of_features(config)),
        (
            "sum",
            shown(memory.sum),
            "with all requests at full length; the KV cache takes what there is, and others wait",
        ),
    ]
    parallel = getattr(config, "parallel_config", None)
    if parallel is not None and parallel.world_size > 1:
        found += load(_WORKER_ROWS)(config)
    several = getattr(config, "data_parallel_config", None)
    if several is not None and (count := several.num_local) > 1:
        found.append(
            ("engines", shown(count * memory.sum), f"{count} times that, on this machine (data_parallel_size)")
        )
    if memory.available is not None:
        share = config.cache_config.gpu_memory_utilization
        found.append(
            ("available", shown(memory.available), f"free now, at most {share:g} of it all (gpu_memory_utilization)")
        )
    return found
