"""Architecture in config.json -> model class (vllm/model_executor/models/registry.py).

A class is imported when it is needed, not before. The rest of the engine expects of it:

    __init__(shape, backend)                                build the parameters, without values
    forward(input_ids, positions, kv_caches, metadata)      hidden states [num_tokens, hidden_size]
    compute_logits(hidden_states)                           float32 [num_rows, vocab_size], or [num_rows, num_labels]
    load_weights(tensors)                                   assign (name, tensor) pairs as a checkpoint has them

To add a model, write such a class and a function that reads its config.json, and name both in a manifest (seams `model` and `architecture`).
"""

from __future__ import annotations

from torch import nn

from stage03_engine.core.models.gpt2 import GPT2LMHeadModel
from stage03_engine.plugins import wanted


def model_class(architecture: str) -> type[nn.Module]:
    """An architecture's class. Raises ConfigError if there is none, or it is not installed."""
    if architecture == "GPT2LMHeadModel":
        return GPT2LMHeadModel
    found: type[nn.Module] = wanted("model", architecture, f"the model {architecture}")
    return found
