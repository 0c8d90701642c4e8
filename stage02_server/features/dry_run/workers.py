"""The memory of one worker of several, computed without torch: for `serve --dry-run`.

Workers that share a layer have equal parts. Stages of a pipeline differ: the first has the embeddings, the last the output matrix.
"""

from __future__ import annotations

from dataclasses import replace

from stage02_server.features.dry_run.memory import (
    QUANTIZED_BYTES,
    count_draft_parameters,
    layer_parameters,
    norm_parameters,
    position_parameters,
    quantization,
    rows_of_features,
    shown,
)
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.rank_config import rank_config, rank_shape
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.stages import has_part
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.kv_cache_size import item_bytes, kv_block_bytes
from stage03_engine.mixins import load
from stage03_engine.model_shape import ModelShape


def rows(config: VllmConfig) -> list[tuple[str, str, str]]:
    """(name, size, how it is made up) for the table: a worker of each stage."""
    parallel, draft = (
        config.parallel_config,
        count_draft_parameters(config) * item_bytes(config),
    )  # whole on each worker
    found = []
    for stage in range(parallel.pipeline_parallel_size):
        own = Ranks(
            stage * parallel.tensor_parallel_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        shape = rank_shape(config.shape, own)
        per_token = kv_block_bytes(rank_config(config, own)) // config.cache_config.block_size
        layers = f"layers {shape.first_layer} to {shape.first_layer + shape.num_layers - 1}"
        who = f"of each of {parallel.tensor_parallel_size} workers with {layers}"
        heads = f"{shape.num_kv_heads} of {config.shape.num_kv_heads} KV heads in {shape.num_layers} layers"
        found.append((f"{own.lane}_weights", shown(_weights(config, shape, own) + draft), who))
        found.append((f"{own.lane}_kv_per_token", shown(per_token), heads))
        more = rows_of_features(rank_config(config, own))
        found += [(f"{own.lane}_{name}", shown(size), how) for name, size, how, _ in more]
    return found


def _weights(config: VllmConfig, shape: ModelShape, own: Ranks) -> int:
    """Bytes of the weights of one worker, whose part of the model is `shape`."""
    whole, size = config.shape, item_bytes(config)
    vocabulary = cdiv(whole.vocab_size, own.tp_size)  # rows
    tables = has_part("wte", whole, own) + (not whole.tie_word_embeddings and has_part("lm_head", whole, own))
    count = tables * vocabulary * whole.hidden_size + shape.num_layers * layer_parameters(shape)
    count += own.is_first_stage * position_parameters(whole) + own.is_last_stage * norm_parameters(whole)
    if not (method := quantization(config)):
        return count * size
    matrices = replace(shape, vocab_size=own.is_last_stage * vocabulary)
    return int(count * size + load(QUANTIZED_BYTES)(matrices, size, method))
