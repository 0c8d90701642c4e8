"""Small models with a classification head, made and saved by transformers, with a tokenizer that joins pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_tokenizers import byte_level
from tokenizers import processors
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gpt2": (GPT2Config, GPT2ForSequenceClassification, GPT2),
    "llama": (LlamaConfig, LlamaForSequenceClassification, LLAMA),
    "mistral": (MistralConfig, MistralForSequenceClassification, LLAMA | {"sliding_window": 9}),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification, LLAMA),
    "qwen3": (Qwen3Config, Qwen3ForSequenceClassification, LLAMA | {"head_dim": 12}),
}


def classifier(folder: Path, family: str, **settings: Any) -> PreTrainedModel:
    """Save one to `folder`. Random weights, large enough that classes differ; `settings` go into its config.json."""
    config_class, model_class, own = FAMILIES[family]
    ids = {"vocab_size": 331, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    torch.manual_seed(7)
    model = model_class(config_class(**(ids | own | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    backend = byte_level()
    joined = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.post_processor = joined
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return model.eval()
