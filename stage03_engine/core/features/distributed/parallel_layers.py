"""What a model of several workers does besides its own work: it adds up, and puts side by side (vllm/model_executor/layers/linear.py,
vocab_parallel_embedding.py; Shoeybi et al. 2019, "Megatron-LM").

A column-parallel layer needs nothing: a smaller matrix gives fewer outputs, which are this worker's heads or columns. The layer after it
takes just these as inputs, so its product is a part of a sum, which `RowParallelLinear` completes: one all-reduce per half layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from stage03_engine.core.features.distributed.parallel_state import Ranks, all_gather, all_reduce
from stage03_engine.core.models.layers import Linear
from stage04_kernels.attention import AttentionMetadata


class RowParallelLinear(nn.Module):
    """A linear layer with a slice of the inputs [num_rows, own inputs]; the outputs [num_rows, out_features] are whole. `inner` stays an
    ordinary layer, which `--linear-backend` and `--quantization` may replace. The bias is added once: by the first worker's product."""

    def __init__(self, inner: Linear, own: Ranks) -> None:
        super().__init__()
        if own.tp_rank > 0:
            inner.bias = None
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all workers' products."""
        return all_reduce(self.inner(x))


class VocabParallelEmbedding(nn.Module):
    """A token embedding of which this worker has the rows from `start` on: [num_tokens] ids -> [num_tokens, hidden_size]."""

    def __init__(self, inner: nn.Embedding, own: Ranks) -> None:
        super().__init__()
        self.inner, self.start = inner, own.tp_rank * inner.num_embeddings

    @property
    def weight(self) -> Tensor:
        """The own rows, [own rows, hidden_size]: with tied weights a slice of the output matrix too."""
        return self.inner.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Each token's row comes from the one worker that has it; the others add zeros."""
        row = input_ids - self.start
        elsewhere = (row < 0) | (row >= self.inner.num_embeddings)
        x = self.inner(row.masked_fill(elsewhere, 0))
        return all_reduce(x.masked_fill(elsewhere[:, None], 0.0))


class TensorParallelModel(nn.Module):
    """Takes the place of the model it wraps: its logits are those of the whole vocabulary.

    Every worker gets them, bit for bit the same, because each slice is computed once and copied to all. The sampler is a function of logits,
    settings, seed and position, so every worker samples the same tokens and appends them to its batch: nothing is sent after sampling.
    """

    def __init__(self, inner: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.inner, self.vocab_size = inner, vocab_size
        # The head of a classifier is whole on every worker.
        self.has_vocabulary = isinstance(getattr(inner, "output_matrix", None), Tensor)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """As the model's own: hidden states [num_tokens, hidden_size], whole on every worker."""
        hidden: Tensor = self.inner(input_ids, positions, kv_caches, metadata)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size]; what slices hold beyond the vocabulary is cut off."""
        logits: Tensor = self.inner.compute_logits(hidden_states)  # type: ignore[operator]
        return all_gather(logits)[:, : self.vocab_size].contiguous() if self.has_vocabulary else logits


def make_parallel(model: nn.Module, own: Ranks) -> None:
    """Put the exchanges into a model of gpt2.py or llama.py whose weights are this worker's slices."""
    for parent in list(model.modules()):
        for name in ("c_proj", "o_proj", "down_proj"):
            if isinstance(layer := getattr(parent, name, None), Linear):
                setattr(parent, name, RowParallelLinear(layer, own))
    for name in ("wte", "embed_tokens"):
        if isinstance(layer := getattr(model, name, None), nn.Embedding):
            setattr(model, name, VocabParallelEmbedding(layer, own))
