"""Stat loggers of the user's own, in vLLM's form: a factory makes one for each engine (vllm/v1/metrics/loggers.py, StatLoggerFactory,
PerEngineStatLogger, load_stat_logger_plugin_factories)."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.stat_loggers.manifest import GROUP
from stage03_engine.frontend.features.stat_loggers.views import StepOfIteration, StepOfScheduler, Totals
from stage03_engine.frontend.metrics import IterationStats, StatLogger, StatLoggers, make_stat_loggers
from stage03_engine.messages import SchedulerStats
from stage03_engine.plugins import PLUGINS, installed

logger = logging.getLogger(__name__)
METHODS = ("record", "log", "log_engine_initialized")
NOT_HERE = "mm_cache_stats"  # of pictures; a logger that takes it gets None


class StatLoggerBase(ABC):
    """What a user's logger may inherit from; another class with these methods is as good."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        """Made before the engine starts."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: StepOfScheduler | None,
        iteration_stats: StepOfIteration | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """After each step of this engine, on the event loop."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine can serve."""

    def log(self) -> None:  # noqa: B027 - for one that writes as it records
        """Every `--log-stats-interval` seconds while there is work, and once more after it."""


class Own(Protocol):
    """A user's logger: these methods, whatever it inherits from."""

    def record(self, **stats: Any) -> None: ...
    def log(self) -> None: ...
    def log_engine_initialized(self) -> None: ...


class OwnStatLogger(StatLogger):
    """The loggers that one factory makes. One that raises is left out from then on: it must not end the engine.

    Raises ConfigError if the factory raises, or makes something without the methods.
    """

    def __init__(self, config: VllmConfig, factory: Callable[[VllmConfig, int], Any]) -> None:
        self._config, self._factory = config, factory
        self._name = getattr(factory, "__qualname__", type(factory).__qualname__)
        self._interval: float = getattr(config.observability_config, "log_stats_interval", 10.0)
        self._loggers: dict[int, Own | None] = {}  # None: it raised
        self._totals: dict[int, Totals] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._serves = False
        several = getattr(config, "data_parallel_config", None)
        for index in (0,) if several is None else several.engine_indices:
            self._make(index)

    def _make(self, index: int) -> None:
        try:
            made: Own = self._factory(self._config, index)
        except Exception as error:  # somebody else's code
            raise ConfigError(f"the stat logger {self._name}: {type(error).__name__}: {error}") from error
        if lacking := [name for name in METHODS if not callable(getattr(made, name, None))]:
            raise ConfigError(
                f"the stat logger {self._name}: what it makes, a {type(made).__name__}, has no {' and no '.join(lacking)}"
            )
        known = inspect.signature(made.record).parameters
        self._takes_all = NOT_HERE in known or any(each.kind is each.VAR_KEYWORD for each in known.values())
        self._loggers[index], self._totals[index] = made, Totals()

    def engine_ready(self) -> None:
        self._serves = True
        for index in self._loggers:
            self._call(index, lambda own: own.log_engine_initialized())

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, engine_index: int = 0) -> None:
        if engine_index not in self._loggers:  # an engine that was added later
            try:
                self._make(engine_index)
            except ConfigError as error:
                self._leave_out(engine_index, error)
            if self._serves:
                self._call(engine_index, lambda own: own.log_engine_initialized())
        if self._loggers[engine_index] is None:
            return
        stats = {
            "scheduler_stats": None if scheduler is None else self._totals[engine_index].step(scheduler),
            "iteration_stats": StepOfIteration.of(iteration, self._totals[engine_index]),
            "engine_idx": engine_index,
        }
        if self._takes_all:
            stats[NOT_HERE] = None
        self._call(engine_index, lambda own: own.record(**stats))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._log)

    def _log(self) -> None:
        self._timer = None
        for index in self._loggers:
            self._call(index, lambda own: own.log())

    def _call(self, index: int, call: Callable[[Own], None]) -> None:
        if (own := self._loggers[index]) is not None:
            try:
                call(own)
            except Exception as error:
                self._leave_out(index, error)

    def _leave_out(self, index: int, error: Exception) -> None:
        self._loggers[index] = None
        logger.warning(
            "The stat logger %s of engine %d failed, and is called no more: %s: %s",
            self._name, index, type(error).__name__, error,
        )  # fmt: skip


def make_loggers(config: VllmConfig, given: StatLoggers) -> list[StatLogger]:
    """Loggers as they are, and those that factories make; with factories alone, the default ones too, as in vLLM. Raises ConfigError."""
    made = [each if isinstance(each, StatLogger) else _of(config, each) for each in given]
    alone = not any(isinstance(each, StatLogger) for each in given)
    return [*make_stat_loggers(config), *made] if alone else made


def _of(config: VllmConfig, factory: Any) -> StatLogger:
    if not callable(factory):
        raise ConfigError(
            f"a stat logger is a StatLogger, or what makes one from (vllm_config, engine_index), not {factory!r}"
        )
    return OwnStatLogger(config, factory)


class PackageLoggers(StatLogger):
    """The loggers that installed packages bring. Raises ConfigError for one that cannot be made."""

    def __init__(self, config: VllmConfig) -> None:
        self._loggers: Sequence[StatLogger] = [_loaded(config, entry) for entry in installed(GROUP, "VLLM_PLUGINS")]

    def engine_ready(self) -> None:
        for each in self._loggers:
            each.engine_ready()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, engine_index: int = 0) -> None:
        for each in self._loggers:
            each.record(scheduler, iteration, engine_index)


def _loaded(config: VllmConfig, entry: EntryPoint) -> StatLogger:
    try:
        return _of(config, entry.load())
    except Exception as error:
        why = error if isinstance(error, ConfigError) else f"it cannot be loaded ({type(error).__name__}: {error})"
        raise ConfigError(
            f"{entry.value}, which an installed package adds as {entry.name}: {why}; {PLUGINS}= leaves it out"
        ) from error
