"""What the benchmarks of the engine share: their flags besides the engine's own, and the result in vLLM's keys."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stage01_cli.bench.result import write_json
from stage03_engine.arg_utils import AsyncEngineArgs, engine_settings
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.fields import add_flags, settings_of
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.resolve import Resolved, resolve_cli
from stage03_engine.config import VllmConfig, option
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.plugins import wanted
from stage03_engine.tracing import open_trace

if TYPE_CHECKING:
    from stage03_engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class ResultArgs:
    """Where the result goes."""

    output_json: str | None = option(None, "file for the result as JSON")


class OfflineBenchmark(CLISubcommand):
    """A measurement of the engine: its flags are those of its `sections`, of the result and of the engine."""

    sections: ClassVar[tuple[type, ...]]
    defaults: ClassVar[dict[str, Any]] = {}  # other defaults for settings of the engine
    refused: ClassVar[tuple[str, ...]] = ("bench-engine",)  # tables of refused.toml, beside the engine's

    @abstractmethod
    def measure(self, config: VllmConfig, sections: list[Any]) -> dict[str, Any]:
        """Check the settings, measure, print; the result with vLLM's keys. Raises StagesError."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of the benchmark."""
        add_offline_args(parser, *self.sections, ResultArgs)
        parser.refuse(*self.refused)

    def cmd(self, args: argparse.Namespace) -> int:
        """Raises StagesError."""
        config, (*sections, where) = resolve_offline(args, *self.sections, ResultArgs, **self.defaults)
        check_writable(where.output_json)
        result = self.measure(config, sections)
        if where.output_json is not None:
            write_json(where.output_json, result)
            print(f"written to {where.output_json}")
        return 0


def add_offline_args(parser: FlexibleArgumentParser, *sections: type) -> None:
    """Add the positional model, the flags of `sections` and those of the engine."""
    parser.usage = "%(prog)s [MODEL] [FLAGS]"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="model to measure, the same as --model")
    for section in sections:
        add_flags(parser, section)
    AsyncEngineArgs.add_cli_args(parser)


def resolve_offline(args: argparse.Namespace, *sections: type, **defaults: Any) -> tuple[VllmConfig, list[Any]]:
    """(engine configuration, one object per section). `defaults` replace defaults of the engine. Raises StagesError."""
    known = [*engine_settings(), *(s for section in sections for s in settings_of(section))]
    settings = resolve_cli(known, args, refused_tables=["engine"])
    for name, value in defaults.items():
        if settings[name].source == "default":
            settings[name] = Resolved(value, "default", "of this benchmark")
    chosen = [section(**{field.name: settings[field.name].value for field in fields(section)}) for section in sections]
    config, _ = AsyncEngineArgs(settings).create_engine_config()
    open_trace(config)
    return config, chosen


def at_least(section: Any, **least: int) -> None:
    """Raises ConfigError for the first setting below its minimum."""
    for name, value in least.items():
        if getattr(section, name) < value:
            raise ConfigError(f"{name} must be at least {value}, not {getattr(section, name)}")


def check_writable(path: str | None) -> None:
    """Check before the benchmark, not after it. Raises ConfigError."""
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")


def offline_engine() -> type[LLM]:
    """The class itself. Raises ConfigError if its feature is not there."""
    found: type[LLM] = wanted("engine", "llm", "the engine without a server")
    return found


@contextmanager
def engine(config: VllmConfig) -> Iterator[LLM]:
    """The engine in its own process, as a server has it. A request that it refuses raises ConfigError."""
    with offline_engine().from_vllm_config(config, multiprocess=True) as llm:
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
