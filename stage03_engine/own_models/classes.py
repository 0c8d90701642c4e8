"""The classes of registered models, as attributes of this module: the architecture GloamForCausalLM is `classes.GloamForCausalLM`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.own_models.registry import model_path
from stage03_engine.plugins import wanted


def __getattr__(architecture: str) -> Callable[..., LanguageModel]:
    """What makes a model, as its class would; ConfigError names the class if that fails. Raises AttributeError for an architecture that nobody registered."""
    try:
        path = model_path(architecture)
    except KeyError:
        raise AttributeError(f"nobody registered {architecture}") from None
    construct = wanted("engine", "construct", "what makes an object of a class of your own")
    return partial(construct, path, f"the model {architecture}:", base=LanguageModel)
