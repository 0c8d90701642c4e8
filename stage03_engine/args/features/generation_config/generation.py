"""`--generation-config` and `--override-generation-config`: how to sample where a request does not say
(vllm/config/model.py, get_diff_sampling_param)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.hf_config import read_json
from stage03_engine.sampling_params import SamplingParams

FILE = "generation_config.json"
_NAMES = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_NAMES["max_new_tokens"] = "max_tokens"
"""Key of the file -> field of SamplingParams. The end-of-text ids in it are read with the model's shape."""


def default_sampling_params(values: Mapping[str, Any], model_path: str | None) -> dict[str, Any]:
    """Fields of SamplingParams for requests that leave them out; `max_tokens` is the most that a request may have.

    `values` holds all settings. `generation_config` is "auto" = the file beside the model if there is one, "vllm" = no file,
    or the folder of the file; `override_generation_config` goes before the file. Raises ConfigError that names the file or the
    setting.
    """
    source, override = values["generation_config"], values["override_generation_config"] or {}
    path = None if source == "vllm" else Path(source, FILE)
    if source == "auto":
        path = Path(model_path, FILE) if model_path else None
        path = path if path is not None and path.is_file() else None
    found = {} if path is None else _checked(read_json(path), str(path))
    check_keys("override_generation_config", override, _NAMES)
    defaults = found | _checked(override, "override_generation_config")
    limit = defaults.get("max_tokens")
    if limit is not None and limit >= values["max_model_len"]:  # the context is the limit already
        del defaults["max_tokens"]
    return defaults


def _checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    named = {_NAMES[key]: value for key, value in values.items() if key in _NAMES and value is not None}
    try:
        params = msgspec.convert(named, SamplingParams)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise ConfigError(f"{where}: {error}") from None
    return {name: getattr(params, name) for name in named}
