"""`adapter_config.json`: what PEFT writes there, of which kind it is, and what of it is built (peft `LoraConfig`; vllm/lora/peft_helper.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from stage03_engine.core.features.lora.files import CONFIG
from stage03_engine.errors import ConfigError

MOST_ALPHA = 1_000_000


class Kind(NamedTuple):
    """What a field may hold. `null` is the same as leaving it out."""

    words: str
    fits: Callable[[Any], bool]


def _is(*kinds: type) -> Callable[[Any], bool]:
    """Exactly: for Python `True` is an integer too."""
    return lambda value: type(value) in kinds


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(type(each) is kind for each in value)


def _either(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(kind(value) for kind in kinds)


FLAG, TEXT, OBJECT = Kind("true or false", _is(bool)), Kind("a text", _is(str)), Kind("an object", _is(dict))
NUMBER = Kind("a number", _is(int, float))
TEXTS = Kind("a list of texts", _list_of(str))
TEXT_OR_TEXTS = Kind("a text or a list of texts", _either(_is(str), _list_of(str)))
WHOLE_OR_WHOLES = Kind("an integer or a list of integers", _either(_is(int), _list_of(int)))

FIELDS: dict[str, Kind] = {
    "peft_type": TEXT, "peft_version": TEXT, "task_type": TEXT, "base_model_name_or_path": TEXT, "revision": TEXT, "auto_mapping": OBJECT,
    "r": Kind("an integer of at least 1", lambda value: type(value) is int and value >= 1),
    "lora_alpha": Kind(
        f"a number between -{MOST_ALPHA} and {MOST_ALPHA}", lambda value: type(value) in (int, float) and abs(value) < MOST_ALPHA
    ),  # NaN does not fit
    "lora_dropout": NUMBER, "inference_mode": FLAG, "fan_in_fan_out": FLAG, "use_rslora": FLAG,
    "init_lora_weights": Kind("true, false or a text", _is(bool, str)), "loftq_config": OBJECT, "eva_config": OBJECT, "corda_config": OBJECT,
    "target_modules": TEXT_OR_TEXTS, "exclude_modules": TEXT_OR_TEXTS, "layers_pattern": TEXT_OR_TEXTS, "layers_to_transform": WHOLE_OR_WHOLES,
    "megatron_config": OBJECT, "megatron_core": TEXT, "qalora_group_size": NUMBER, "ensure_weight_tying": FLAG,
    "use_dora": FLAG, "use_qalora": FLAG, "lora_bias": FLAG, "bias": TEXT, "modules_to_save": TEXTS, "target_parameters": TEXTS,
    "rank_pattern": OBJECT, "alpha_pattern": OBJECT, "arrow_config": OBJECT,
    "layer_replication": Kind("a list", _is(list)), "alora_invocation_tokens": Kind("a list of integers", _list_of(int)),
    "trainable_token_indices": Kind("an object or a list of integers", _either(_is(dict), _list_of(int))),
}  # fmt: skip
"""The fields that PEFT knows. Others are not looked at."""
NEEDED = ("r", "lora_alpha")
NOT_BUILT = (
    "use_dora", "use_qalora", "lora_bias", "bias", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern", "arrow_config",
    "layer_replication", "alora_invocation_tokens", "trainable_token_indices",
)  # fmt: skip
"""Fields that change what an adapter computes, in a way that is not built."""


def parse_config(content: bytes) -> dict[str, Any]:
    """The fields of an adapter_config.json, without those that are null. Raises ConfigError that names the field."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG} is not valid JSON: {error}") from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        raise ConfigError(f"{CONFIG} describes no LoRA adapter: peft_type must be LORA")
    config = {key: value for key, value in found.items() if value is not None}
    for key, kind in FIELDS.items():
        if key in config or key in NEEDED:
            _check(key, kind, config.get(key))
    for key in NOT_BUILT:
        if config.get(key) and config[key] != "none":
            raise ConfigError(f"{key} {str(config[key])[:100]!r} is not built")
    return config


def _check(key: str, kind: Kind, value: Any) -> None:
    if not kind.fits(value):
        raise ConfigError(f"{key} must be {kind.words}, not {json.dumps(value)[:100]}")
