"""What the benchmarks of the engine share: their flags beside the engine's own, and the result in vLLM's keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage01_cli.bench.not_built import OFFLINE_FLAGS
from stage01_cli.bench.result import write_json
from stage03_engine.arg_utils import AsyncEngineArgs, engine_settings
from stage03_engine.args import Resolved, add_flags, add_not_built, resolve_cli, settings_of
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.tracing import open_trace

if TYPE_CHECKING:
    from stage03_engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_offline_args(parser: argparse.ArgumentParser, *sections: type) -> None:
    """Add the positional model, the flags of `sections` and those of the engine."""
    parser.usage = "%(prog)s [MODEL] [FLAGS]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="model to measure, the same as --model")
    for section in sections:
        add_flags(parser, section)
    AsyncEngineArgs.add_cli_args(parser)
    add_not_built(parser, OFFLINE_FLAGS)


def resolve_offline(args: argparse.Namespace, *sections: type, **defaults: Any) -> tuple[VllmConfig, list[Any]]:
    """(engine configuration, one object per section). `defaults` replace defaults of the engine. Raises StagesError."""
    settings = resolve_cli([*engine_settings(), *(s for section in sections for s in settings_of(section))], args)
    for name, value in defaults.items():
        if settings[name].source == "default":
            settings[name] = Resolved(value, "default", "of this benchmark")
    chosen = [section(**{field.name: settings[field.name].value for field in fields(section)}) for section in sections]
    config, _ = AsyncEngineArgs(settings).create_engine_config()
    open_trace(config)
    return config, chosen


def at_least(section: Any, **least: int) -> None:
    """Raises ConfigError for the first setting that is less than it may be."""
    for name, value in least.items():
        if getattr(section, name) < value:
            raise ConfigError(f"{name} must be at least {value}, not {getattr(section, name)}")


def check_writable(path: str | None) -> None:
    """Better before the benchmark than after it. Raises ConfigError."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")


@contextmanager
def engine(config: VllmConfig) -> Iterator[LLM]:
    """The engine in its own process, as a server has it. A request that it refuses is a ConfigError."""
    from stage03_engine.llm import LLM

    with LLM.from_vllm_config(config, multiprocess=True) as llm:
        try:
            yield llm
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Keys as JSON has them: `{"10": ..., "99": ...}`."""
    import numpy as np

    return {str(percentile): float(np.percentile(seconds, percentile)) for percentile in PERCENTILES}


def print_times(title: str, seconds: list[float]) -> None:
    """Mean and percentiles, a line each."""
    print(f"{title + ', mean':42}{sum(seconds) / len(seconds):>12.4f}")
    for percentile, value in percentiles(seconds).items():
        print(f"{'  p' + percentile:42}{value:>12.4f}")


def save(path: str | None, result: dict[str, Any]) -> None:
    """Write the JSON if a path was given. Raises ConfigError."""
    if path is not None:
        write_json(path, result)
        print(f"written to {path}")
