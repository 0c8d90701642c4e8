"""Functions of installed packages that register what they add (vllm/plugins/__init__.py, load_general_plugins).

They are called in each process that meets an architecture which it does not know, once. vLLM calls them in every process: here a server that needs none
of them imports none of them.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint

from stage03_engine.errors import ConfigError
from stage03_engine.hf_config import readers
from stage03_engine.plugins import PLUGINS, installed

logger = logging.getLogger(__name__)
GROUPS = ("vllm_in_stages.general_plugins", "vllm.general_plugins")
"""Ours, for a package that vLLM must not load; and vLLM's."""


@cache
def load_general_plugins() -> dict[str, str]:
    """Call the functions that the entry points name, each once; returns what is known then, as `readers` does. Raises ConfigError for what a
    function says wrongly."""
    for group in GROUPS:
        for entry in installed(group, "VLLM_PLUGINS"):
            _call(entry)
    return readers()


def _call(entry: EntryPoint) -> None:
    who = f"{entry.value}, which an installed package adds as {entry.name},"
    try:
        entry.load()()
    except ConfigError as error:
        raise ConfigError(f"{who} registers wrongly: {error}; {PLUGINS}= leaves it out") from error
    except Exception as error:  # somebody else's code, perhaps made for vLLM alone
        logger.warning("%s was left out (%s: %s)", who, type(error).__name__, error)
