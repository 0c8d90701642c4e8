"""What the shapes of other models than GPT-2 hold besides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary embedding was stretched to a longer context: `linear`, or `llama3` with its three numbers."""

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Of the Llama family."""

    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    sliding_layers: tuple[int, ...] = ()  # the layers to which that applies
    attention_bias: bool = False  # of the query, key and value matrices
    attention_output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys


@dataclass(frozen=True, kw_only=True)
class WhisperShape:
    """Of Whisper."""

    multilingual: bool = True  # False for a model that was trained on English alone


@dataclass(frozen=True, kw_only=True)
class ClassifierShape:
    """Of models with a classification head."""

    labels: tuple[str, ...] = ()  # the names of the classes, in the order of the head's rows
    label_activation: str = "softmax"  # to probabilities; sigmoid: each class by itself; identity: bare logits
