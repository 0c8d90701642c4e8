"""The memory of adapters, computed without torch: for `serve --dry-run`.

The places are the same bytes from the start. The cache holds what was loaded: at most this, if every adapter has the highest rank and changes
every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.core.kv_cache_size import item_bytes
from stage03_engine.model_shape import ModelShape

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def pair_lengths(shape: ModelShape) -> int:
    """in_features + out_features of all linear layers: the numbers of an adapter's pairs for each of its ranks."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if shape.architecture.startswith("GPT2"):
        layer = (hidden + queries + 2 * keys) + (queries + hidden) + 2 * (hidden + inner)
    else:
        layer = (hidden + queries) + 2 * (hidden + keys) + (queries + hidden) + 3 * (hidden + inner)
    return shape.num_layers * layer


def memory_rows(config: VllmConfig) -> list[tuple[str, int, str, bool]]:
    """(name, bytes, how it is made up, is it on the device) of the places and of the cache."""
    lora = config.lora_config
    if not lora.enable_lora:
        return []
    size = _ITEM_BYTES.get(lora.lora_dtype) or item_bytes(config)
    each = pair_lengths(config.shape) * lora.max_lora_rank * size
    cached = lora.max_cpu_loras or lora.max_loras
    how = f"of rank {lora.max_lora_rank} (max_lora_rank) for all linear layers"
    on_cpu = config.device_config.device == "cpu"
    return [
        ("adapter_places", lora.max_loras * each, f"{lora.max_loras} (max_loras) {how}", True),
        (
            "adapter_cache",
            cached * each,
            f"in the CPU's memory, at most: {cached} adapters (max_cpu_loras) {how}",
            on_cpu,
        ),
    ]
