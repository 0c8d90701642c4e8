"""`--speculative-config`: one JSON object, checked key by key (vllm/config, SpeculativeConfig)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import internal, option
from stage03_engine.args.parser import check_keys
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
DEFAULT_LOOKUP = 5  # vLLM's, when neither bound is given
MAX_VALUE = 128  # of each number: longer drafts are useless, and every draft position costs a row of logits

COUNTS = {
    "spec_decode_num_drafts": "Steps in which a request had drafts.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that stood.",
}
"""Metric -> what it counts."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: guess tokens and verify several in one step. `method` None means off."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
        '"prompt_lookup_max": 4}; off if not given',
        aliases=("-sc",),
    )
    method: str | None = internal(None)
    num_speculative_tokens: int = internal(0)
    prompt_lookup_min: int = internal(0)
    prompt_lookup_max: int = internal(0)


@dataclass(frozen=True)
class SpecDecodeFlags:
    """Part of VllmConfig."""

    speculative_config: SpeculativeConfig = SpeculativeConfig()

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """What the JSON says, key by key."""
        return parse_speculative_config(values["speculative_config"])

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError if the model generates nothing."""
        if config.speculative_config.method is not None and "generate" not in config.supported_tasks:
            raise ConfigError(
                "runner pooling generates nothing, so there is nothing to speculate; leave out one of the two"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The runner proposes drafts, the scheduler makes room for them. Not together with custom logits processors: they
        may look at the tokens before a position, which for a draft are not certain."""
        if config.speculative_config.method is None or getattr(config.model_config, "logits_processors", None):
            return {}
        return {
            "scheduler": ["stage03_engine.core.features.spec_decode.draft_scheduler:DraftHook"],
            "runner": ["stage03_engine.core.features.spec_decode.ngram_proposer:NgramHook"],
        }


def parse_speculative_config(given: dict[str, Any] | None) -> dict[str, Any]:
    """The internal fields of SpeculativeConfig; none if it is off. Of the two lookup lengths, a missing one takes the value
    of the other. Raises ConfigError that names the key."""
    if given is None:
        return {}
    check_keys("speculative_config", given, KEYS)
    if given.get("method") != "ngram":
        raise ConfigError(f"speculative_config: method must be 'ngram', not {given.get('method')!r}")
    count = _positive("num_speculative_tokens", given.get("num_speculative_tokens"))
    low = given.get("prompt_lookup_min", given.get("prompt_lookup_max", DEFAULT_LOOKUP))
    shortest = _positive("prompt_lookup_min" if "prompt_lookup_min" in given else "prompt_lookup_max", low)
    longest = _positive("prompt_lookup_max", given.get("prompt_lookup_max", shortest))
    if shortest > longest:
        raise ConfigError(f"speculative_config: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}")
    return {
        "method": "ngram",
        "num_speculative_tokens": count,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }


def _positive(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_VALUE:  # not isinstance: True is no number here
        raise ConfigError(f"speculative_config: {key} must be an integer in [1, {MAX_VALUE}], not {value!r}")
    return value


FEATURE = Feature(
    name="spec_decode",
    help="speculative decoding: n-grams of the request's own text as drafts, checked in one step",
    room=__package__,
    also=("stage04_kernels.features.rejection_sampler",),
    settings={"VllmConfig": SpecDecodeFlags},
    parts=(
        Part("replay", ".recorded_drafts:RecordedDraftHook", key="spec.proposed"),
        Part("counts", ".manifest:COUNTS"),
    ),
    events=("spec.proposed", "spec.scheduled", "spec.verified"),
)
