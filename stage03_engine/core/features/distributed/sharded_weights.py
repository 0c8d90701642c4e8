"""Each worker reads its slices of the checkpoint, and nothing else (vLLM: the `weight_loader` of each parallel layer).

A column-parallel matrix is cut along its outputs, a row-parallel one along its inputs, an embedding along the vocabulary; norms, position
embeddings and the biases of row-parallel layers are whole everywhere. safetensors files are mapped into memory: rows of a matrix that
are contiguous stay where they are, and other slices are copied; pages that nobody uses are not kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.parallel_state import ranks
from stage03_engine.core.features.distributed.rank_config import whole_shape
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.stages import leave_out, local_name
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.models.layers import embedding
from stage03_engine.core.models.registry import model_class
from stage03_engine.errors import ConfigError
from stage03_engine.model_path import weight_files
from stage03_engine.model_shape import ModelShape
from stage03_engine.plugins import wanted

VOCABULARY = ("wte", "embed_tokens", "lm_head")
"""The parts of a model that have a row for each token."""


@dataclass(frozen=True)
class Split:
    """How a tensor is cut: in which dimension, and what is counted along it. If it consists of several `parts` in a row, each is cut."""

    dim: int
    along: str
    parts: int = 1


SPLITS = {
    # GPT-2 stores a matrix as [inputs, outputs], and queries, keys and values as one.
    "attn.c_attn.weight": Split(1, "heads", parts=3),
    "attn.c_attn.bias": Split(0, "heads", parts=3),
    "attn.c_proj.weight": Split(0, "heads"),
    "mlp.c_fc.weight": Split(1, "intermediate"),
    "mlp.c_fc.bias": Split(0, "intermediate"),
    "mlp.c_proj.weight": Split(0, "intermediate"),
    # The Llama family stores it as [outputs, inputs].
    "q_proj.weight": Split(0, "heads"),
    "q_proj.bias": Split(0, "heads"),
    "k_proj.weight": Split(0, "kv_heads"),
    "k_proj.bias": Split(0, "kv_heads"),
    "v_proj.weight": Split(0, "kv_heads"),
    "v_proj.bias": Split(0, "kv_heads"),
    "o_proj.weight": Split(1, "heads"),
    "gate_proj.weight": Split(0, "intermediate"),
    "up_proj.weight": Split(0, "intermediate"),
    "down_proj.weight": Split(1, "intermediate"),
    **{f"{name}.weight": Split(0, "vocabulary") for name in VOCABULARY},
}
"""End of a tensor's name in the checkpoint -> how it is cut. Every other tensor is whole on every worker."""


def sharded_tensors(config: VllmConfig, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, this worker's slice) of each tensor of its stage. `config` is the worker's own (`rank_config`). `model` has no values yet: this
    cuts its vocabulary, and takes out what other stages have. Raises what `weight_files` raises, and ConfigError for a file that cannot be read or does not fit."""
    own, whole = ranks(), whole_shape(config.shape)
    cut_vocabulary(model, whole, own)
    leave_out(model, whole, own)
    if config.model_config.load_format == "dummy":
        return _dummy_slices(config, whole, own, dtype)
    return _checkpoint_slices(Path(config.model_config.model_path or ""), whole, own)


def cut_vocabulary(model: nn.Module, whole: ModelShape, own: Ranks) -> None:
    """Cut the model's embedding and output matrix down to the rows of one worker. Touches no memory."""
    for name in VOCABULARY:
        if isinstance(layer := getattr(model, name, None), nn.Embedding):
            with torch.device("meta"):
                setattr(model, name, embedding(cdiv(whole.vocab_size, own.tp_size), layer.embedding_dim))


def _checkpoint_slices(folder: Path, whole: ModelShape, own: Ranks) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as checkpoint:
                for name in checkpoint.keys():  # noqa: SIM118 - not a dict
                    if (local := _wanted(name, whole, own)) is None:
                        continue
                    if (split := split_of(name)) is None:
                        yield local, checkpoint.get_tensor(name)
                    else:
                        yield local, cut(name, checkpoint.get_slice(name), split, whole, own)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read the weights in {file}: {error}") from error


def _dummy_slices(
    config: VllmConfig, whole: ModelShape, own: Ranks, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Slices of the random model that a single worker would have, so that the tokens are the same."""
    with torch.device("meta"):
        model = model_class(whole.architecture)(whole, config.device_config.attention_backend)
    dummy_tensors = wanted("engine", "dummy_weights", "--load-format dummy")
    for name, tensor in dummy_tensors(model, config.model_config.seed, dtype):
        if (local := _wanted(name, whole, own)) is not None:
            split = split_of(name)
            yield local, tensor if split is None else cut(name, tensor, split, whole, own)


def _wanted(name: str, whole: ModelShape, own: Ranks) -> str | None:
    """The tensor's name in this worker's stage; None if the worker has no part in it."""
    again = name == "lm_head.weight" and whole.tie_word_embeddings
    return None if again else local_name(name, whole, own)


def split_of(name: str) -> Split | None:
    """How the tensor is cut; None if it is whole on every worker."""
    return next((split for end, split in SPLITS.items() if name.endswith(end)), None)


def cut(name: str, stored: Any, split: Split, whole: ModelShape, own: Ranks) -> Tensor:
    """The worker's slice of a tensor, which is torch's or a lazy slice of a safetensors file. Raises ConfigError if its size is not the configured one."""
    sizes = list(stored.shape if isinstance(stored, Tensor) else stored.get_shape())
    length = length_of(split.along, whole)
    if len(sizes) <= split.dim or sizes[split.dim] != split.parts * length:
        raise ConfigError(
            f"{name} has shape {sizes}, the configuration says {split.parts * length} in dimension {split.dim}"
        )
    start, stop = own_range(split.along, whole, own)
    before = (slice(None),) * split.dim
    ends = [(part * length + start, part * length + min(stop, length)) for part in range(split.parts)]
    tensors = [stored[(*before, slice(begin, end))] for begin, end in ends if begin < end]
    missing = split.parts * (stop - start) - sum(tensor.shape[split.dim] for tensor in tensors)
    if missing:  # rows after the end of the vocabulary
        tensors.append(torch.zeros(missing, *sizes[1:], dtype=stored[0:1].dtype))
    return (torch.cat(tensors, split.dim) if len(tensors) > 1 else tensors[0]).contiguous()


def length_of(along: str, shape: ModelShape) -> int:
    """How many rows or columns there are of this kind in the whole model."""
    return {
        "heads": shape.num_heads * shape.head_dim,
        "kv_heads": shape.num_kv_heads * shape.head_dim,
        "intermediate": shape.intermediate_size,
        "vocabulary": shape.vocab_size,
    }[along]


def own_range(along: str, whole: ModelShape, own: Ranks) -> tuple[int, int]:
    """(start, end) of the worker's rows or columns. All slices have the same size; the last ones may reach beyond the end of the vocabulary.

    Workers that share a KV head are neighbours: theirs are the query heads that read it.
    """
    rank, slices = own.tp_rank, own.tp_size
    if along == "kv_heads" and slices > whole.num_kv_heads:
        rank, slices = rank * whole.num_kv_heads // slices, whole.num_kv_heads
    size = cdiv(length_of(along, whole), slices)
    return rank * size, (rank + 1) * size
