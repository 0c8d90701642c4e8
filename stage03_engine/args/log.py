"""The log of each process (vllm/logger.py): where it goes, and how each line begins. Like vLLM's (decorate_logs), a line begins with
the name of its process.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stage03_engine.args.fields import settings_of
from stage03_engine.config import ObservabilityConfig, VllmConfig
from stage03_engine.mixins import load
from stage03_engine.plugins import find
from stagetrace.redact import redact_values
from stagetrace.terminal import is_terminal
from stagetrace.text import OneLineRecord

if TYPE_CHECKING:
    from stage03_engine.args.resolve import Resolved

FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"
OWN_LOGGERS = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels")


def configure_logging(process: str, flags: ObservabilityConfig) -> None:
    """Send everything from INFO upwards to stderr, unless logging is set up already or a feature sets it up. Either way each record
    is one line (OneLineRecord). Raises ConfigError for a log configuration that cannot be used."""
    logging.setLogRecordFactory(OneLineRecord)
    if (set_up := find("engine", "log_config")) and set_up(flags):
        return
    lines, handler = is_terminal(sys.stderr) and find("engine", "terminal_log"), logging.StreamHandler(sys.stderr)
    whole = logging.Formatter(f"({process} pid={os.getpid()}) {FORMAT}", DATE_FORMAT)
    handler.setFormatter(lines(process) if lines else whole)
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    if flags.log_level != "INFO":
        for name in OWN_LOGGERS:
            logging.getLogger(name).setLevel(flags.log_level or "WARNING")


def log_of_server(settings: dict[str, Resolved], dry_run: bool) -> None:
    """Choose the level of a server's log if none was, and set the log up. Raises ConfigError."""
    if settings["log_level"].value is None:
        settings["log_level"] = replace(settings["log_level"], value="INFO")
    if not dry_run:
        process = "Node" if "headless" in settings and settings["headless"].value else "APIServer"
        given = {each.name: settings[each.name].value for each in settings_of(ObservabilityConfig)}
        configure_logging(process, ObservabilityConfig(**given))


def name_process(process: str) -> None:
    """Show the process under its name in `ps` and `top` (vLLM: set_process_title). The rest of its command line stays."""
    try:
        from setproctitle import getproctitle, setproctitle
    except ModuleNotFoundError:  # only a name
        return
    _, *words = getproctitle().split(" ")
    setproctitle(" ".join([f"stages::{process}", *words]))


def enter_process(process: str, config: VllmConfig) -> None:
    """In a process that was started for the server: its name, its log, and what features do first. Raises ConfigError."""
    name_process(process)
    configure_logging(process, config.observability_config)
    for hook in config.hooks("process"):
        load(hook)(config)


def not_default(settings: Mapping[str, Resolved]) -> dict[str, str]:
    """Setting -> its value and origin, of those that are not at their default; without secrets."""
    given = {name: f"{one.value} from {one.origin}" for name, one in settings.items() if one.source != "default"}
    return redact_values(given)


def announce(config: VllmConfig, *more_sections: object) -> None:
    """Log what is started, if a feature says it. `more_sections` hold the settings of the server."""
    if say := find("engine", "start_log"):
        say(config, *more_sections)


def seconds_since_start() -> float:
    """How long this process has existed."""
    import psutil  # only for this line

    return time.time() - psutil.Process().create_time()
