"""Architecture in config.json -> model class (vllm/model_executor/models/registry.py).

A class is imported when it is needed, not before. The rest of the engine expects of it:

    __init__(shape, backend)                                build the parameters, without values
    forward(input_ids, positions, kv_caches, metadata)      hidden states [num_tokens, hidden_size]
    compute_logits(hidden_states)                           float32 [num_rows, vocab_size], or [num_rows, num_labels]
    load_weights(tensors)                                   assign (name, tensor) pairs as a checkpoint has them

To add a model, write such a class, name it here, and read its config.json in stage03_engine/hf_config.py.
"""

from __future__ import annotations

from torch import nn

from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there, load

_LLAMA = "stage03_engine.core.models.more.llama:LlamaForCausalLM"
_LLAMA_CLASSIFIER = "stage03_engine.core.features.pooling.classification:LlamaForSequenceClassification"

MODELS = {
    "GPT2LMHeadModel": "stage03_engine.core.models.gpt2:GPT2LMHeadModel",
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "GPT2ForSequenceClassification": "stage03_engine.core.features.pooling.classification:GPT2ForSequenceClassification",
    "LlamaForSequenceClassification": _LLAMA_CLASSIFIER,
    "MistralForSequenceClassification": _LLAMA_CLASSIFIER,
    "Qwen2ForSequenceClassification": _LLAMA_CLASSIFIER,
    "Qwen3ForSequenceClassification": _LLAMA_CLASSIFIER,
}
"""Architecture -> module:class. Mistral and Qwen are Llamas with other settings in ModelShape."""


def model_class(architecture: str) -> type[nn.Module]:
    """Import an architecture's class. Raises KeyError for one that is not in MODELS, ConfigError if it is not installed."""
    module = MODELS[architecture].partition(":")[0]
    if not is_there(module):
        raise ConfigError(f"the model {architecture} is not installed: {module} is missing")
    found: type[nn.Module] = load(MODELS[architecture])
    return found
