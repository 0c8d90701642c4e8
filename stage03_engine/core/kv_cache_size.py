"""The number of KV-cache blocks (vllm/v1/engine/core.py, _initialize_kv_caches; v1/core/kv_cache_utils.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import psutil

from stage03_engine.config import VllmConfig
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import each
from stage03_engine.plugins import find
from stagetrace import trace

CPU_DEFAULT_BYTES = 4 << 30
"""The most that the KV cache takes on a CPU when no size is given: other programs need memory too (vLLM's CPU backend has
the same default)."""
NO_ROOM = (
    "there is not enough memory for {} KV-cache blocks; lower --kv-cache-memory-bytes or --num-gpu-blocks-override"
)

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float": 4, "half": 2, "uint8": 1}


def item_bytes(config: VllmConfig) -> int:
    """Bytes of one number of the weights."""
    return _ITEM_BYTES[config.model_config.dtype]


def head_layout(config: VllmConfig) -> tuple[str, str, int]:
    """How the KV cache holds one head's key, or value, of one token: (its format, as a user names it; the dtype of the cache's tensors; so many of these).
    Tensors and memory plans both follow from it. The model's own numbers, unless a feature has another format for them."""
    own, dtype = find("engine", "head_layout"), config.model_config.dtype
    return (own and own(config)) or (dtype, dtype, config.shape.head_dim)


def kv_block_bytes(config: VllmConfig) -> int:
    """Bytes of one KV-cache block over all layers: keys and values."""
    shape, (_, dtype, size) = config.shape, head_layout(config)
    per_token = 2 * shape.num_layers * shape.num_kv_heads * size * _ITEM_BYTES[dtype]
    per_token += sum(more(config) for more in each(VllmConfig, "kv_per_token")) * item_bytes(config)
    return per_token * config.cache_config.block_size


class MeasuresMemory(Protocol):
    """What the executor measures on the device."""

    def kv_block_bytes(self) -> int: ...
    def determine_available_memory(self) -> int: ...


def decide_num_blocks(config: VllmConfig, executor: MeasuresMemory) -> int:
    """The number of blocks, the null block included. Raises ConfigError when not even one request of full length fits."""
    block_bytes = executor.kv_block_bytes()
    rule, num_blocks = choose_num_blocks(config, block_bytes, executor.determine_available_memory)
    if trace.on:
        size = num_blocks * block_bytes
        trace.emit("kv_cache.profiled", available_bytes=size, block_bytes=block_bytes, num_blocks=num_blocks, rule=rule)
    return num_blocks


def choose_num_blocks(config: VllmConfig, block_bytes: int, measure: Callable[[], int]) -> tuple[str, int]:
    """(the rule that decides, the number of blocks); `measure` gives the free memory in bytes.

    In this order: --num-gpu-blocks-override, --kv-cache-memory-bytes, measured free memory. On a CPU the measured size is
    capped at 4 GiB, and on any device at what --max-num-seqs requests of full length can use.
    Raises ConfigError when not even one request of full length fits, and on a CPU when the machine has less memory than that.
    """
    cache, blocks_per_request = config.cache_config, cdiv(config.max_model_len, config.cache_config.block_size)
    if cache.num_gpu_blocks_override is not None:
        rule, num_blocks = "num_gpu_blocks_override", cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        rule, num_blocks = "kv_cache_memory_bytes", cache.kv_cache_memory_bytes // block_bytes
    else:
        rule, available = "free memory", measure()
        if config.device_config.device == "cpu" and available > CPU_DEFAULT_BYTES:
            rule, available = "CPU default", CPU_DEFAULT_BYTES
        num_blocks = available // block_bytes
        useful = config.scheduler_config.max_num_seqs * blocks_per_request + 1
        if num_blocks > useful:
            rule, num_blocks = "max_num_seqs x max_model_len", useful
    if num_blocks - 1 < blocks_per_request:
        more = "--kv-cache-memory-bytes or --gpu-memory-utilization" if " " in rule else "--" + rule.replace("_", "-")
        raise ConfigError(
            f"the KV cache has room for {max(0, num_blocks - 1) * cache.block_size} tokens ({rule}), but one request may need "
            f"{config.max_model_len}: lower --max-model-len, or raise {more}"
        )
    if config.device_config.device == "cpu" and num_blocks * block_bytes > psutil.virtual_memory().total:
        raise ConfigError(NO_ROOM.format(num_blocks))  # the system would give it, and kill the engine when it fills up
    return rule, num_blocks
