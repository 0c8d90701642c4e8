"""Models that name a class instead of the next token (vllm/model_executor/models/adapters.py, as_seq_cls_model).

The body is that of the generating model; a head with one row per class replaces the output matrix. Such a checkpoint has
no output matrix, so the body is built as one that shares it with the token embedding.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from stage03_engine.core.features.llama.llama import LlamaForCausalLM
from stage03_engine.core.models.gpt2 import GPT2LMHeadModel
from stage03_engine.core.models.layers import embedding
from stage03_engine.model_shape import ModelShape


class GPT2ForSequenceClassification(GPT2LMHeadModel):
    """GPT-2 with a head."""

    output_matrix = None  # type: ignore[assignment]  # the head makes the logits

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__(replace(shape, tie_word_embeddings=True), backend)
        # a matrix of float32 products, which nothing packs
        self.score = embedding(len(shape.labels), shape.hidden_size)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, num_labels]."""
        return F.linear(hidden_states.float(), self.score.weight.float())


class LlamaForSequenceClassification(LlamaForCausalLM):
    """The Llama family with a head."""

    output_matrix = None  # type: ignore[assignment]

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__(replace(shape, tie_word_embeddings=True), backend)
        # a matrix of float32 products, which nothing packs
        self.score = embedding(len(shape.labels), shape.hidden_size)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, num_labels]."""
        return F.linear(hidden_states.float(), self.score.weight.float())
