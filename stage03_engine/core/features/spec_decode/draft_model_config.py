"""`--speculative-config` with a model that drafts: its keys, its files, and whether it fits the target (vllm/config/speculative.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from stage03_engine.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from stage03_engine.core.features.spec_decode.manifest import keys_of, positive, refused
from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.hf_config import read_json
from stage03_engine.model_path import resolve_model
from stage03_engine.model_shape import ModelShape

if TYPE_CHECKING:
    from stage03_engine.model_path import ModelFiles

SAMPLE_METHODS = ("coupled", "greedy", "probabilistic")
"""How the draft chooses its tokens. `coupled` is ours, and the default; the others are vLLM's."""
ONLY = {
    "draft_tensor_parallel_size": (1, "each worker has all of the draft: it is small"),
    "rejection_sample_method": ("standard", "block verification and made-up acceptance are not built"),
    "quantization": (None, "the draft has the dtype of the target"),
    "kv_cache_dtype": (None, "what a draft keeps has the number format of --dtype"),
    "attention_backend": (None, "the draft uses the target's"),
    "enforce_eager": (None, "--enforce-eager holds for both models"),
    "revision": (None, "name a folder that holds the revision"),
    "use_heterogeneous_vocab": (False, "draft and target have one vocabulary"),
    "parallel_drafting": (False, "not built"),
}
"""vLLM's keys that have one value here -> it, and why."""
LONGEST_NAME = 1000  # of a model, in characters
MAX_BATCH_SIZE = 2**31 - 1  # more requests than a batch ever holds: "and all above"
KEYS = (
    "method", "model", "num_speculative_tokens", "max_model_len", "draft_sample_method",
    "num_speculative_tokens_per_batch_size", "adaptive_num_speculative_tokens", *ONLY,
)  # fmt: skip


def parse_draft_model(given: dict[str, Any], values: Mapping[str, Any], files: ModelFiles) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig. Raises ConfigError that names the key, or says why the draft does not fit, and
    ModelNotFoundError."""
    given = keys_of(given, KEYS)
    fields = parse_drafter(given)
    # the target may be stored in a way that the draft is not: slices, or pickled
    draft = _find(given["model"], "dummy" if values["load_format"] == "dummy" else "auto", files, values)
    return fields | {
        "method": "draft_model",
        "draft_model_path": draft.model_path,
        "draft_load_format": "dummy" if values["load_format"] == "dummy" else draft.load_format,
        "draft_shape": asdict(draft.shape),
        "draft_max_model_len": context(given, draft.shape.max_position_embeddings, "the draft's context"),
    }


def parse_drafter(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of whatever drafts with weights of its own, a model or heads. Raises ConfigError that names the key."""
    for key, (value, why) in ONLY.items():
        if key in given and (type(given[key]) is not type(value) or given[key] != value):  # 1.0 and True are not 1
            raise refused(key, f"can only be {value!r}", given[key], why)
    checked_name(given)
    method = given.get("draft_sample_method", "coupled")
    if method not in SAMPLE_METHODS:
        raise refused("draft_sample_method", f"must be one of {', '.join(SAMPLE_METHODS)}", method)
    adaptive = given.get("adaptive_num_speculative_tokens", True)
    if type(adaptive) is not bool:
        raise refused("adaptive_num_speculative_tokens", "must be true or false", adaptive)
    count = positive("num_speculative_tokens", given.get("num_speculative_tokens"))
    return {
        "num_speculative_tokens": count,
        "draft_sample_method": method,
        "adaptive_num_speculative_tokens": adaptive,
        "num_speculative_tokens_per_batch_size": _by_batch_size(given.get("num_speculative_tokens_per_batch_size", []), count),
    }  # fmt: skip


def checked_name(given: Mapping[str, Any]) -> str:
    """The model that drafts. Raises ConfigError."""
    model = given.get("model")
    if type(model) is not str or not 0 < len(model) <= LONGEST_NAME or not model.isprintable():
        raise refused("model", "must name a bundled model, a Hugging Face id or a folder", model)
    return model


def _find(name: str, load_format: str, target: ModelFiles, values: Mapping[str, Any]) -> ModelFiles:
    """The draft's files. Raises ConfigError if it is the target, or has another vocabulary."""
    try:  # it speaks in the target's tokens: one that brings no tokenizer is no worse
        of_target = {"hf_overrides": None, "revision": None, "tokenizer_revision": None}
        draft = resolve_model(name, load_format, target.tokenizer_path, SimpleNamespace(**{**values, **of_target}))
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"speculative_config: {error}") from error
    if draft.model_path is not None and load_format != "dummy":
        config = read_json(Path(draft.model_path) / "config.json")
        if config.get("quantization_config") or config.get("compression_config"):
            raise ConfigError(f"speculative_config: the draft {name!r} is quantized, and a draft has ordinary weights")
    both = draft.model_path, target.model_path
    if None not in both and os.path.realpath(str(both[0])) == os.path.realpath(str(both[1])):
        raise ConfigError(f"speculative_config: model {name!r} is the target itself; a draft is a smaller model")
    if draft.shape.vocab_size != target.shape.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft {name!r} has {draft.shape.vocab_size} tokens in its vocabulary, and the target "
            f"{target.shape.vocab_size}: a draft needs the target's vocabulary"
        )
    own = None if draft.model_path is None else _vocabulary(Path(draft.model_path))
    if own is not None and target.tokenizer_path is not None:
        theirs = _vocabulary(Path(target.tokenizer_path))
        if theirs is not None and own != theirs:
            raise ConfigError(
                f"speculative_config: the draft {name!r} has another tokenizer than the target: {_difference(own, theirs)}"
            )
    return draft


def _vocabulary(folder: Path) -> dict[str, Any] | None:
    """Token -> id, from a folder's tokenizer files; None if it has none. Raises ConfigError for a file that cannot be read."""
    whole, split = folder / "tokenizer.json", folder / "vocab.json"
    if not whole.is_file():
        return read_json(split) if split.is_file() else None
    content = read_json(whole)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # a unigram model: [token, score] each
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    return (vocabulary or {}) | {each["content"]: each["id"] for each in added}


def _difference(own: dict[str, Any], theirs: dict[str, Any]) -> str:
    token = min(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
    return f"{token!r} is token {own.get(token)} of the draft and {theirs.get(token)} of the target"


def context(given: dict[str, Any], longest: int, whose: str) -> int:
    """Up to where it drafts: all of its context, or less. Raises ConfigError."""
    asked = given.get("max_model_len", longest)
    if type(asked) is not int or not 1 <= asked <= longest:
        raise refused("max_model_len", f"must be an integer in [1, {longest}], {whose}", asked)
    return asked


def _by_batch_size(given: Any, most: int) -> tuple[tuple[int, int, int], ...]:
    """[[first, last, tokens], ...]: with that many requests, both ends included, so many tokens are drafted."""
    fits = isinstance(given, list) and all(
        isinstance(row, list) and len(row) == 3 and all(type(number) is int for number in row)
        and 1 <= row[0] <= row[1] <= MAX_BATCH_SIZE and 0 <= row[2] <= most
        for row in given
    )  # fmt: skip
    if not fits:
        raise refused(
            "num_speculative_tokens_per_batch_size",
            f"must be a list of [first batch size, last one, tokens], with at most {most} tokens (num_speculative_tokens)", given,
        )  # fmt: skip
    return tuple((row[0], row[1], row[2]) for row in given)


def check_draft_model(config: VllmConfig) -> None:
    """Raises ConfigError for a draft that is no model of text."""
    if "generate" not in draft_config(config).supported_tasks:
        raise ConfigError("speculative_config: the draft is no model that generates text")


def check_own_blocks(config: VllmConfig) -> None:
    """Of what drafts with keys and values of its own. Raises ConfigError where blocks travel without its part of them."""
    what = {"draft_model": "a draft model", "eagle": "an EAGLE head"}[config.speculative_config.method]
    if getattr(config, "kv_transfer_config", None) is not None and config.kv_transfer_config.path is not None:
        raise ConfigError(
            f"kv_transfer_config cannot be combined with {what}: its folder holds the target's keys and values alone; leave "
            "out one of the two"
        )
    roles = getattr(getattr(config, "disaggregation_config", None), "disaggregate", None)
    if roles is not None or getattr(getattr(config, "kv_transfer_config", None), "kv_port", None) is not None:
        raise ConfigError(
            f"{'kv_transfer_config' if roles is None else 'disaggregate'} cannot be combined with {what}: what travels is the target's keys and "
            "values alone; leave out one of the two"
        )


def draft_config(config: VllmConfig) -> VllmConfig:
    """The draft's configuration: what a forward pass needs, and otherwise the defaults, so that no feature of the target's steps
    (adapters, workers, swapping) takes part in the draft's."""
    own, scheduler = config.speculative_config, config.scheduler_config
    return VllmConfig(
        model_config=ModelConfig(
            dtype=config.model_config.dtype, max_model_len=min(own.draft_max_model_len, config.max_model_len),
            load_format=own.draft_load_format, seed=config.model_config.seed, model_path=own.draft_model_path,
            shape=msgspec.convert(own.draft_shape, ModelShape),
        ),
        cache_config=CacheConfig(block_size=config.cache_config.block_size),
        scheduler_config=SchedulerConfig(
            max_num_seqs=scheduler.max_num_seqs, max_num_batched_tokens=scheduler.max_num_batched_tokens
        ),
        device_config=config.device_config,
    )  # fmt: skip
