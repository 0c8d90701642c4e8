"""The size and kind of a model, as its config.json gives them (hf_config.py reads it)."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.plugins import loaded


@dataclass(frozen=True)
class ModelShape(*loaded("shape")):  # type: ignore[misc]
    """What a model's config.json says about its size (vLLM reads it as hf_config)."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    layer_norm_epsilon: float = 1e-5
    torch_dtype: str = "float32"
    eos_token_id: int | None = None
    more_eos_token_ids: tuple[int, ...] = ()  # some models have several tokens that end a text
    activation_function: str = "gelu_new"  # between the two matrices of GPT-2's MLP
    scale_attn_weights: bool = True  # by 1 / sqrt(head_dim), and with the next one by 1 / the layer's number too
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True  # the output matrix is the token embedding

    @property
    def whole(self) -> ModelShape:
        """The model that this is a part of: itself, unless workers share it."""
        return self
