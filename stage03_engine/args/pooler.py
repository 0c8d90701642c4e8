"""`--runner`, `--convert` and `--pooler-config` (vllm/config/model.py, pooler.py)."""

from __future__ import annotations

from typing import Any

from stage03_engine.args.parser import did_you_mean
from stage03_engine.errors import ConfigError
from stage03_engine.params.pooling_params import POOLING_TYPES

_OLD_NAMES = {"seq_pooling_type": "pooling_type", "normalize": "use_activation"}
"""Keys that vLLM knows under two names."""
KEYS = ("pooling_type", "use_activation", "dimensions")


def parse_pooling(runner: str, convert: str, given: dict[str, Any] | None, has_head: bool = False) -> dict[str, Any]:
    """The computed fields of PoolingConfig. `has_head`: the model has a classification head instead of an output matrix.

    Raises ConfigError that names the setting or the key.
    """
    if runner == "draft":
        raise ConfigError("runner draft is not built; see --help for what is")
    if runner == "generate" and has_head:
        raise ConfigError("runner generate needs a model that writes text; this one has a classification head instead")
    if runner == "generate" and convert in ("embed", "classify"):
        raise ConfigError(f"convert {convert} needs runner pooling (or auto), not generate")
    if convert == "none" and (runner == "pooling" or has_head):
        raise ConfigError(
            "runner pooling needs convert embed or classify (or auto): the models here are made to generate"
        )
    pooling = runner == "pooling" or convert in ("embed", "classify") or has_head
    if given is not None and not pooling:
        raise ConfigError("pooler_config needs runner pooling")
    values, converted = _checked(given or {}), "classify" if has_head else "embed"
    return {
        "runner_type": "pooling" if pooling else "generate",
        "convert_type": (converted if convert == "auto" else convert) if pooling else "none",
        "pooling_type": values.get("pooling_type", "LAST"),
        "use_activation": values.get("use_activation", True),
        "dimensions": values.get("dimensions"),
    }


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = _OLD_NAMES.get(key, key)
        if name not in KEYS:
            raise ConfigError(f"pooler_config: unknown key {key!r}{did_you_mean(str(key), KEYS)}")
        if name in values:
            raise ConfigError(f"pooler_config: {name} is given twice")
        values[name] = value.upper() if name == "pooling_type" and isinstance(value, str) else value
    if values.get("pooling_type", "LAST") not in POOLING_TYPES:
        kinds = ", ".join(POOLING_TYPES)
        raise ConfigError(f"pooler_config: pooling_type must be one of {kinds}, not {values['pooling_type']!r}")
    if type(values.get("use_activation", True)) is not bool:
        raise ConfigError(f"pooler_config: use_activation must be true or false, not {values['use_activation']!r}")
    size = values.get("dimensions")
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"pooler_config: dimensions must be a positive integer, not {size!r}")
    return values
