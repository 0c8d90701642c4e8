"""What models that see have in common (vllm/model_executor/models/interfaces.py, SupportsMultiModal)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from stage03_engine.core.features.llama.llama import LlamaForCausalLM
from stage03_engine.core.models.layers import LanguageModel, assign_weights
from stage03_engine.params.multimodal import MultiModalFeature
from stage04_kernels.attention import AttentionMetadata


class SupportsMultiModal(LanguageModel):
    """The language model reads the prompt; `encode` is called for each picture before that."""

    language_model: LlamaForCausalLM

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """As the language model's."""
        hidden: Tensor = self.language_model(input_ids, positions, kv_caches, metadata)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """As the language model's."""
        return self.language_model.compute_logits(hidden_states)

    def encode(self, picture: MultiModalFeature) -> Tensor:
        """A picture -> [its places, hidden_size]. One at a time: so it does not depend on what else is encoded (vLLM: embed_multimodal)."""
        raise NotImplementedError

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ConfigError for a checkpoint that does not fit."""
        assign_weights(self, tensors, self._parameter_name)

    def _parameter_name(self, name: str) -> str | None:
        """From the checkpoint's name of a tensor to this model's. None for what is not a weight, or not used."""
        raise NotImplementedError

    def _of_the_language_model(self, name: str) -> str | None:
        """As `_parameter_name`, for what is not the tower's."""
        inner = self.language_model._parameter_name(name.removeprefix("language_model."))
        return None if inner is None else f"language_model.{inner}"
