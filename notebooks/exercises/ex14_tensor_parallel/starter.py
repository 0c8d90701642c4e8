"""Tensor parallelism: several workers (ranks) that share every layer of a model.

`Ranks` says which worker this is: own.tp_rank of own.tp_size. `ModelShape` says how large the whole model is: num_heads,
num_kv_heads, head_dim, intermediate_size, vocab_size. Matrices are cut by their outputs (column-parallel) or by their inputs
(row-parallel); what has to be exchanged goes through torch.distributed (`dist`).
"""

from __future__ import annotations

import torch  # noqa: F401
import torch.distributed as dist
from torch import Tensor, nn

from stage03_engine.core.features.distributed.parallel_layers import TensorParallelModel as Mechanics
from stage03_engine.core.features.distributed.parallel_state import all_gather, all_reduce  # noqa: F401 - for you to call
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import Split, length_of  # noqa: F401 - for you to call
from stage03_engine.core.models.layers import Linear
from stage03_engine.errors import ConfigError  # noqa: F401 - for you to raise
from stage03_engine.model_shape import ModelShape


def check_divides(shape: ModelShape, tp_size: int) -> None:
    """Raise ConfigError if this model cannot be cut into `tp_size` equal slices.

    Each worker gets as many attention heads as the others, and as many columns of the MLP (intermediate_size). KV heads either divide
    among the workers in the same way, or there are fewer of them than workers, and the workers divide among them: 2 KV heads are
    possible with 1, 2, 4 or 6 workers, but not with 3.
    """
    raise NotImplementedError


def own_range(along: str, whole: ModelShape, own: Ranks) -> tuple[int, int]:
    """(start, end) of this worker's rows or columns, where `along` says what they stand for: "heads", "kv_heads" (a head is head_dim
    rows or columns), "intermediate" or "vocabulary". length_of(along, whole) is the length of the whole, in rows or columns.

    All slices have the same size, and follow each other as the ranks do. A vocabulary need not divide: its slices are rounded up, and
    the last ones may reach beyond its end. If there are more workers than KV heads, neighbours share one: of 2 KV heads and 4 workers
    the ranks 0 and 1 have the first, 2 and 3 the second.
    """
    raise NotImplementedError


def cut(name: str, stored: Tensor, split: Split, whole: ModelShape, own: Ranks) -> Tensor:
    """This worker's slice of a tensor: own_range(split.along, ...) in dimension `split.dim` (0 or 1).

    stored       the whole tensor, mapped from its file: what is not sliced out of it is never read
    split.parts  the tensor consists of so many equal parts in a row along that dimension (queries, keys and values in one matrix): this
                 worker's slice is its slice of each part, one after the other. Each part has length_of(split.along, whole).
    Rows of the range that lie after the end (of a vocabulary) are zeros. Raises ConfigError, with the name, if the tensor has no such
    dimension, or another size in it than the parts together.
    """
    raise NotImplementedError


class RowParallelLinear(nn.Module):
    """A linear layer that takes this worker's slice of the inputs, [num_rows, own inputs], and gives whole outputs, [num_rows,
    out_features], the same on every worker.

    `inner` is an ordinary layer with this worker's columns of the matrix, [out_features, own inputs], and the whole bias, inner.bias
    [out_features] or None. It must stay an attribute of this name. Let it multiply, inner(x): the server may keep the matrix in another
    form (transposed, packed, quantized), and inner.weight and inner.bias are None then. What inner is not to add you take away before,
    in __init__: there inner.bias may be set to None.
    """

    def __init__(self, inner: Linear, own: Ranks) -> None:
        super().__init__()
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all workers' products, plus the bias. all_reduce(tensor) gives the sum of all workers' tensors."""
        raise NotImplementedError


class TensorParallelModel(Mechanics):
    """A model whose vocabulary is spread over the workers. Given: self.inner (the model with this worker's slices),
    self.vocab_size (of the whole), self.has_vocabulary (False for a classifier, whose head is whole on every worker)."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]: self.inner.compute_logits gives this worker's slice of the logits,
        all_gather(tensor) puts the slices of all workers side by side, in the order of the ranks. The whole in one piece: contiguous().
        """
        raise NotImplementedError


def all_reduce_in_place(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """x becomes the sum of the x of all members of the group, with the same bits on each of them.

    You have: dist.get_rank(group) and dist.get_world_size(group); dist.all_gather(list_of_tensors, x, group=group), which writes the x of
    rank i into entry i; and dist.isend / dist.send / dist.recv(tensor, rank, group=group), if you want to build a ring: send waits until
    the other receives, isend(...) gives a handle to wait() for. (dist.all_reduce would be the answer without the question.)
    """
    raise NotImplementedError
