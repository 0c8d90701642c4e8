"""Architecture in config.json -> model class (vllm/model_executor/models/registry.py).

A class is imported when it is needed, not before. What the rest of the engine asks of it:

    __init__(shape, backend)                                build the parameters, without values
    forward(input_ids, positions, kv_caches, metadata)      hidden states [num_tokens, hidden_size]
    compute_logits(hidden_states)                           float32 [num_rows, vocab_size], or [num_rows, num_labels]
    load_weights(tensors)                                   take (name, tensor) pairs as a checkpoint has them

To add a model, write such a class, name it here, and read its config.json in stage03_engine/hf_config.py.
"""

from __future__ import annotations

from importlib import import_module

from torch import nn

MODELS = {
    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("llama", "LlamaForCausalLM"),
    "GPT2ForSequenceClassification": ("classification", "GPT2ForSequenceClassification"),
    "LlamaForSequenceClassification": ("classification", "LlamaForSequenceClassification"),
    "MistralForSequenceClassification": ("classification", "LlamaForSequenceClassification"),
    "Qwen2ForSequenceClassification": ("classification", "LlamaForSequenceClassification"),
    "Qwen3ForSequenceClassification": ("classification", "LlamaForSequenceClassification"),
}
"""Architecture -> (module in this folder, class). Mistral and Qwen are Llamas with other settings in ModelShape."""


def model_class(architecture: str) -> type[nn.Module]:
    """Import the class of an architecture. Raises KeyError for one that is not in MODELS."""
    module, name = MODELS[architecture]
    return getattr(import_module(f"stage03_engine.core.models.{module}"), name)
