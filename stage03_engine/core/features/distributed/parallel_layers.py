"""What the workers of one model exchange: sums, and slices side by side (vllm/model_executor/layers/linear.py,
vocab_parallel_embedding.py; Shoeybi et al. 2019, "Megatron-LM").

A column-parallel layer needs no exchange: a smaller matrix gives fewer outputs, which are this worker's heads or columns. The next layer
takes exactly these as inputs, so its product is one term of a sum. `RowParallelLinear` completes it: one all-reduce per half layer.
"""

from __future__ import annotations

from torch import Tensor, nn

from stage03_engine.core.features.distributed.parallel_state import all_gather, all_reduce
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.models.layers import LanguageModel, Linear
from stage04_kernels.attention import AttentionMetadata


class RowParallelLinear(nn.Module):
    """A linear layer that takes a slice of the inputs, [num_rows, own inputs], and gives whole outputs, [num_rows, out_features]. `inner`
    stays an ordinary layer, which `--linear-backend` and `--quantization` may replace. Only the first worker adds the bias."""

    def __init__(self, inner: Linear, own: Ranks) -> None:
        super().__init__()
        if own.tp_rank > 0:
            inner.bias = None
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all workers' products."""
        return all_reduce(self.inner(x))


class VocabParallelEmbedding(nn.Module):
    """This worker's rows of a token embedding, from `start` on: [num_tokens] ids -> [num_tokens, hidden_size]."""

    def __init__(self, inner: nn.Embedding, own: Ranks) -> None:
        super().__init__()
        self.inner, self.start = inner, own.tp_rank * inner.num_embeddings

    @property
    def weight(self) -> Tensor:
        """This worker's rows, [own rows, hidden_size]. With tied weights they are also its slice of the output matrix."""
        return self.inner.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """The one worker that has a token's row contributes it; the others add zeros."""
        row = input_ids - self.start
        elsewhere = (row < 0) | (row >= self.inner.num_embeddings)
        x = self.inner(row.masked_fill(elsewhere, 0))
        return all_reduce(x.masked_fill(elsewhere[:, None], 0.0))


class TensorParallelModel(LanguageModel):
    """Wraps a model, and gives the logits of the whole vocabulary.

    Every worker gets the same logits, bit for bit, because each slice is computed once and copied to all. The sampler is a function of logits,
    settings, seed and position. So every worker samples the same tokens and appends them to its batch; nothing is sent after sampling.
    """

    def __init__(self, inner: LanguageModel, vocab_size: int) -> None:
        super().__init__()
        self.inner, self.vocab_size = inner, vocab_size
        # The head of a classifier is whole on every worker.
        self.has_vocabulary = isinstance(getattr(inner, "output_matrix", None), Tensor)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """Hidden states, [num_tokens, hidden_size], whole on every worker."""
        hidden: Tensor = self.inner(input_ids, positions, kv_caches, metadata)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size]. The padding of the last slices is cut off."""
        logits: Tensor = self.inner.compute_logits(hidden_states)
        return all_gather(logits)[:, : self.vocab_size].contiguous() if self.has_vocabulary else logits


def make_parallel(model: nn.Module, own: Ranks) -> None:
    """Add the exchanges to a model of gpt2.py or llama.py whose weights are this worker's slices."""
    for parent in list(model.modules()):
        for name in ("c_proj", "o_proj", "down_proj"):
            if isinstance(layer := getattr(parent, name, None), Linear):
                setattr(parent, name, RowParallelLinear(layer, own))
    for name in ("wte", "embed_tokens"):
        if isinstance(layer := getattr(model, name, None), nn.Embedding):
            setattr(model, name, VocabParallelEmbedding(layer, own))
