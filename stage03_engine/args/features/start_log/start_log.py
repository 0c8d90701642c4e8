"""The first lines of the log: what is started, and with what (vllm/entrypoints/common/startup.py, log_non_default_args)."""

from __future__ import annotations

import logging
from dataclasses import fields

from stage03_engine import __version__
from stage03_engine.args.cpu import find_cores
from stage03_engine.args.fields import settings_of
from stage03_engine.config import VllmConfig
from stagetrace.redact import HIDDEN, redact_values

logger = logging.getLogger(__name__)


def say(config: VllmConfig, *more_sections: object) -> None:
    """Log the version, the model and the settings that are not at their default (those that were detected too); and warn if the
    answers will mean nothing. `more_sections` hold the settings of the server."""
    model = config.model_config
    logger.info("vLLM in stages %s, model %s", __version__, model.model)
    sections = [*(getattr(config, each.name) for each in fields(config)), *more_sections]
    values = [(each, getattr(section, each.name)) for section in sections for each in settings_of(type(section))]
    given = {each.name: HIDDEN if each.secret else value for each, value in values if value != each.default}
    hidden = redact_values({name: str(value) for name, value in given.items()})
    shown = {
        name: value if isinstance(value, bool) else hidden[name] for name, value in given.items()
    }  # a switch is no secret
    logger.info("Settings: %s", ", ".join(f"{name}={value}" for name, value in shown.items()))
    if config.device_config.device == "cpu":
        logger.info("On the CPU (%s): %s", find_cores(), _how_it_computes(config))
    for section in more_sections:
        for warning in getattr(section, "warnings", tuple)():
            logger.warning(warning)
    if model.load_format == "dummy":
        tokenizer = " and the tokenizer is a stand-in, a token per byte" if model.tokenizer_path is None else ""
        logger.warning("The weights are random%s (--load-format dummy): the answers mean nothing.", tokenizer)


def _how_it_computes(config: VllmConfig) -> str:
    threads, dtype = f"compute threads: {config.device_config.num_threads or 1}", config.model_config.dtype
    return f"{threads}, {dtype}{'' if dtype == 'float32' else '; --dtype float32 is exact'}."
