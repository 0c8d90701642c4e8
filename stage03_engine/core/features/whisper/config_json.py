"""Whisper's config.json (vllm/transformers_utils/config.py)."""

from __future__ import annotations

from dataclasses import replace

from stage03_engine.hf_config import Config, plain_shape
from stage03_engine.model_shape import ModelShape


def read_whisper(config: Config, architecture: str) -> ModelShape:
    """Of the decoder: the encoder's sizes are transformers' business, which runs the model."""
    keys = ("d_model", "decoder_attention_heads", "decoder_layers", "max_target_positions")
    shape = plain_shape(config, architecture, config.size("decoder_ffn_dim"), *keys)
    generation = config.path.with_name("generation_config.json")
    english_only = generation.is_file() and Config(generation).values.get("is_multilingual") is False
    return replace(shape, multilingual=not english_only)  # type: ignore[call-arg]
