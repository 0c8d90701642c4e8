"""Each worker reads its slices of the checkpoint, and nothing else (vLLM: the `weight_loader` of each parallel layer).

A column-parallel matrix is cut along its outputs, a row-parallel one along its inputs, an embedding along the vocabulary; norms, position
embeddings and the biases of row-parallel layers are whole everywhere. The checkpoint is mapped into memory: rows of a matrix that
are contiguous stay where they are, and other slices are copied; pages that nobody uses are not kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.stages import local_name
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.models.layers import embedding
from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape

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


def own_slices(tensors: Iterator[tuple[str, Tensor]], whole: ModelShape, own: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(name, this worker's slice) of each tensor of its stage. Raises ConfigError for a tensor that does not fit."""
    for name, tensor in tensors:
        if (local := _wanted(name, whole, own)) is not None:
            split = split_of(name)
            yield local, tensor if split is None else cut(name, tensor, split, whole, own)


def cut_vocabulary(model: nn.Module, whole: ModelShape, own: Ranks) -> None:
    """Cut the model's embedding and output matrix down to the rows of one worker. Touches no memory."""
    for name in VOCABULARY:
        if isinstance(layer := getattr(model, name, None), nn.Embedding):
            with torch.device("meta"):
                setattr(model, name, embedding(cdiv(whole.vocab_size, own.tp_size), layer.embedding_dim))


def _wanted(name: str, whole: ModelShape, own: Ranks) -> str | None:
    """The tensor's name in this worker's stage; None if the worker has no part in it."""
    again = name == "lm_head.weight" and whole.tie_word_embeddings
    return None if again else local_name(name, whole, own)


def split_of(name: str) -> Split | None:
    """How the tensor is cut; None if it is whole on every worker."""
    return next((split for end, split in SPLITS.items() if name.endswith(end)), None)


def cut(name: str, stored: Tensor, split: Split, whole: ModelShape, own: Ranks) -> Tensor:
    """The worker's slice of a tensor. Raises ConfigError if its size is not the configured one."""
    sizes = list(stored.shape)
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
