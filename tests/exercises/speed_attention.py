"""What `--speed` times of exercises 6 and 7: one step of a small model, in which prompts, chunks and decodes stand beside each other.
The plain twin is the oracle of stage04: one token and one head at a time, in torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from attention_batch import Batch, close, random_tensors
from torch import Tensor

from stage04_kernels.backends.reference import paged_attention_reference, write_kv_reference

BATCH = Batch(((0, 24), (63, 1), (40, 1), (17, 1), (24, 8)), block_size=8, num_heads=4, num_kv_heads=2)
HEAD_DIM, SCALE = 32, 0.2


def numbers(turn: int) -> tuple[Tensor, Tensor]:
    """The query and the cache of a call."""
    query, cache = random_tensors(BATCH, HEAD_DIM)
    return query + torch.randn(query.shape, generator=torch.Generator().manual_seed(turn)), cache


def written_then_attended(write: Callable[..., None], attend: Callable[..., Tensor], turn: int) -> Callable[[], Tensor]:
    """The step in torch. The new tokens' keys are the beginning of the query's heads, their values the end."""
    (query, cache), metadata = numbers(turn), BATCH.metadata()
    key, value = query[:, : BATCH.num_kv_heads].clone(), query[:, BATCH.num_kv_heads :].clone()

    def call() -> Tensor:
        write(key, value, cache, metadata.slot_mapping)
        return attend(query, cache, metadata, SCALE)

    return call


def torch_step(parts: ModuleType, turn: int) -> Callable[[], Tensor]:
    """Exercise 6."""
    return written_then_attended(parts.write_kv, parts.paged_attention_torch, turn)


def plain_step(turn: int) -> Callable[[], Tensor]:
    """Its twin."""
    return written_then_attended(write_kv_reference, paged_attention_reference, turn)


def kernel_step(parts: ModuleType, turn: int) -> Callable[[], Tensor]:
    """Exercise 7: the kernel, in tiles of the size that a GPU's matrix units take, so that its loop goes round several times."""
    from stage04_kernels.triton_kernels import paged_attention as kernels
    from stage04_kernels.triton_kernels.tiles import AttentionTiles, Tile

    (query, cache), metadata = numbers(turn), BATCH.metadata()
    names = ("_load_blocks", "_load_keys_and_values", "_scores", "_softmax_step", "_paged_attention")
    own: dict[str, Any] = {name: getattr(parts, name) for name in names}
    tiles = AttentionTiles("speed", lambda *_: Tile(16, 16, 4), 1, True, 1)

    def call() -> Tensor:
        with mock.patch.multiple(kernels, **own), np.errstate(all="ignore"):
            result: Tensor = kernels.paged_attention_triton(query, cache, metadata, SCALE, num_splits=1, tiles=tiles)
        return result

    return call


def plain_attention(turn: int) -> Callable[[], Tensor]:
    """Its twin."""
    (query, cache), metadata = numbers(turn), BATCH.metadata()
    return lambda: paged_attention_reference(query, cache, metadata, SCALE)


def same(got: Any, expected: Tensor) -> bool:
    """A tensor that is there already, not one that computes itself when it is looked at."""
    return type(got) is Tensor and got.shape == expected.shape and close(got, expected, expected.dtype)
