"""Flags and keyword arguments become a VllmConfig (vllm/engine/arg_utils.py, EngineArgs and AsyncEngineArgs)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from stage03_engine.args.check import check_config
from stage03_engine.args.fields import Setting, add_flags, settings_of
from stage03_engine.args.log import not_default
from stage03_engine.args.parser import FlexibleArgumentParser, did_you_mean
from stage03_engine.args.resolve import (
    Resolved,
    detect_device,
    detect_settings,
    resolve_cli,
    resolve_settings,
    with_detected,
)
from stage03_engine.args.unknown import check_variables, refuse_absent
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import gathered
from stage03_engine.model_path import ModelFiles, resolve_model
from stage03_engine.plugins import parts
from stage04_kernels.attention import choose_backend
from stagetrace import trace

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def engine_settings() -> list[Setting]:
    """The settings of all sections of VllmConfig, in order."""
    return [setting for section in SECTIONS.values() for setting in settings_of(section)]


class EngineArgs:
    """Every setting of the engine with its source, before the model is found.

    `settings` maps each field name of SECTIONS to its Resolved. Others (of the HTTP server) are left alone. A caller in Python gives
    keywords instead, `EngineArgs(model="gpt2-tiny", block_size=8)`, which rank as flags do; STAGES_* variables apply to what is not
    given. Raises ConfigError, also for an unknown keyword.
    """

    def __init__(self, settings: dict[str, Resolved] | None = None, **given: Any) -> None:
        self.settings = _of_keywords(given) if settings is None else settings

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> None:
        """Add one flag per engine setting, and `--config`."""
        if parts("engine", "config_file"):
            parser.add_argument("--config", metavar="FILE", help="YAML file with settings, one `name: value` per line")
        for section in SECTIONS.values():
            add_flags(parser, section)
        parser.refuse("engine")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> EngineArgs:
        """From a command line parsed with `add_cli_args`, and perhaps a positional `model_tag`.

        Raises ConfigError.
        """
        return cls(resolve_cli(engine_settings(), args, environ, ["engine"]))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> VllmConfig:
        """The configuration that these keywords make. Raises ModelNotFoundError too."""
        return cls(**kwargs).create_engine_config()[0]

    def create_engine_config(self) -> tuple[VllmConfig, dict[str, Resolved]]:
        """Find the model, fill in what can be detected, check the result.

        Returns the configuration and the final settings, sources included. Raises ModelNotFoundError, or ConfigError if a
        setting is impossible, alone or together with another.
        """
        model, dtype = self.settings["model"], self.settings["dtype"]
        values = SimpleNamespace(**_values(self.settings))
        files = resolve_model(values.model, values.load_format, values.tokenizer, values)
        dtype_name = _DTYPE_ALIASES.get(dtype.value, dtype.value)
        settings = self.settings | {"model": _aliased(model, files.name), "dtype": _aliased(dtype, dtype_name)}
        settings = with_detected(settings, {"device": detect_device()})
        device = settings["device"].value
        if files.load_format != "auto":
            settings = with_detected(settings, {"load_format": (files.load_format, "the files of the model")})
        known = _values(settings) | {"shape": files.shape}
        settings = with_detected(settings, gathered(VllmConfig, "detect", known))
        settings = with_detected(settings, detect_settings(files.shape, device))
        if settings["attention_backend"].value == "auto":
            settings = with_detected(settings, {"attention_backend": choose_backend(device)})
        config = _build(settings, files)
        check_config(config)
        check_variables(os.environ, settings)
        if trace.on:
            given = not_default(settings)
            trace.emit("config.resolved", settings=given, defaults=len(settings) - len(given))
        return config, settings


def _of_keywords(given: Mapping[str, Any]) -> dict[str, Resolved]:
    settings = engine_settings()
    known = {setting.name for setting in settings}
    for name in given:
        if name not in known:
            refuse_absent("--" + name.replace("_", "-"))
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, known)}")
    return resolve_settings(settings, given)


AsyncEngineArgs = EngineArgs
"""vLLM's AsyncEngineArgs adds flags for the logging of requests; here both take the same."""


def _aliased(asked: Resolved, name: str) -> Resolved:
    return asked if asked.value == name else Resolved(name, asked.source, f"{asked.detail}, alias {asked.value}")


def _values(settings: Mapping[str, Resolved]) -> dict[str, Any]:
    return {name: found.value for name, found in settings.items()}


def _build(settings: Mapping[str, Resolved], files: ModelFiles) -> VllmConfig:
    """Fill each section with the values of its fields: settings, or values computed here and by the features."""
    values = _values(settings)
    values |= {"model_path": files.model_path, "tokenizer_path": files.tokenizer_path, "shape": files.shape}
    values |= gathered(VllmConfig, "resolve", values, files)
    sections = {}
    for name, section in SECTIONS.items():
        own = {field.name: values[field.name] for field in fields(section) if field.name in values}
        sections[name] = section(**own)
    return VllmConfig(**sections)
