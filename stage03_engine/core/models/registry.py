"""Architecture in config.json -> model class (vllm/model_executor/models/registry.py).

A class is imported when it is needed, not before. To add a model, write a `LanguageModel` and a function that reads its config.json, and
name both in a manifest (seams `model` and `architecture`).
"""

from __future__ import annotations

from stage03_engine.core.models.gpt2 import GPT2LMHeadModel
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.plugins import find, parts, wanted


def model_class(architecture: str) -> type[LanguageModel]:
    """An architecture's class. Raises ConfigError if there is none, or it is not installed."""
    if architecture == "GPT2LMHeadModel":
        return GPT2LMHeadModel
    if not parts("model", architecture) and (ask_packages := find("engine", "general_plugins")):
        ask_packages()
    found: type[LanguageModel] = wanted("model", architecture, f"the model {architecture}")
    return found
