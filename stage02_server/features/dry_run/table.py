"""The table of `serve --dry-run`: every setting, its value, and where that came from; and the memory of a start.

vLLM logs only the arguments that differ from their defaults (entrypoints/common/startup.py, log_non_default_args).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.dry_run.memory import check_kv_cache, estimate_memory, rows
from stage02_server.features.dry_run.start_checks import check_start, has_a_model
from stage03_engine.args.fields import settings_of
from stage03_engine.args.resolve import Resolved
from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.mixins import each
from stage03_engine.plugins import STAGES, absent_features, features
from stagetrace.redact import HIDDEN


def table(config: VllmConfig, settings: Mapping[str, Resolved]) -> str:
    """One line per setting, in three columns, grouped as in `--help`; last, what was read from the model's folder, and the
    memory that a start would take. Raises StagesError for what the start would refuse."""
    check_start(config, settings)
    groups: list[tuple[str, list[tuple[str, str, str]]]] = []
    for section in filter(settings_of, [*SECTIONS.values(), FrontendArgs]):  # one without settings is computed
        found = [(one, settings[one.name]) for one in settings_of(section)]
        shown = [(one.name, _shown(known.value, one.secret), known.origin) for one, known in found]
        groups.append((section.__name__, shown))
    groups.append(("Model", _model_rows(config)))
    if "transcription" not in config.supported_tasks:  # a core of its own, without a paged KV cache
        memory = estimate_memory(config)
        if has_a_model(settings):
            check_kv_cache(config, memory)
        groups.append(("Memory", rows(config, memory)))
    if prepares := [row for more in each(VllmConfig, "start_rows") for row in more(config)]:
        groups.append(("Before the first request", prepares))
    groups += [("Features", others)] if (others := _features()) else []
    all_rows = [row for _, group in groups for row in group]
    widths = [min(32, max(len(row[column]) for row in all_rows)) for column in (0, 1)]  # a long path may stick out
    lines = []
    for title, group in groups:
        lines.append(title)
        lines.extend(f"  {name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in group)
    return "\n".join(lines)


def _features() -> list[tuple[str, str, str]]:
    """Those of other packages, and those of the index that are not here."""
    guests = [(each.name, each.help, each.room) for each in features("stage02_server") if each.stage not in STAGES]
    return guests + [(name, "not here", why) for name, why in absent_features("stage02_server").items()]


def _model_rows(config: VllmConfig) -> list[tuple[str, str, str]]:
    model = config.model_config
    rows = [(name, _shown(getattr(model, name)), "detected") for name in ("model_path", "tokenizer_path")]
    source = "detected (config.json)" if model.model_path else "detected (known shape)"
    return rows + [(name, _shown(value), source) for name, value in asdict(config.shape).items()]


def _shown(value: Any, secret: bool = False) -> str:
    """Values as they are written in a config file; text without quotes."""
    if secret and value is not None:
        return HIDDEN
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")
