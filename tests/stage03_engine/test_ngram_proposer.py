"""Prompt lookup against a search that reads like its definition, and who gets no drafts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer, find_continuation
from stage03_engine.core.features.spec_decode.verifier import free_of_history, needs_history
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import struct_of
from stage03_engine.params.logits_rules import LogitsRules
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams


def naive(tokens: list[int], shortest: int, longest: int) -> int | None:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return start + n
    return None


lookups = st.tuples(st.integers(1, 5), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), lookups)
def test_the_search_is_the_naive_one(tokens: list[int], lookup: tuple[int, int]) -> None:
    assert find_continuation(np.array(tokens), *lookup) == naive(tokens, *lookup)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), lookups, st.integers(1, 9))
def test_a_proposal_copies_token_by_token(tokens: list[int], lookup: tuple[int, int], count: int) -> None:
    start = naive(tokens, *lookup)
    text = list(tokens)
    for i in range(count if start is not None else 0):
        text.append(text[start + i])  # may read what it has just written
    assert proposer(count, *lookup).propose(np.array(tokens)) == text[len(tokens) :]


def config_of(**spec: object) -> VllmConfig:
    return EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config={"method": "ngram", **spec})


def proposer(count: int, shortest: int, longest: int) -> NgramProposer:
    spec = {"num_speculative_tokens": count, "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    return NgramProposer(config_of(**spec).speculative_config)


VALUES: dict[str, Any] = {
    "logit_bias": {1: 1.0}, "allowed_token_ids": [1], "bad_words": ["a"], "bad_words_token_ids": [[1]],
    "structured_outputs": StructuredOutputsParams(choice=["a"]), "min_tokens": 3, "prompt_logprobs": 1,
}  # fmt: skip
ACTING = [name for name, seams in SamplingParams.HOOKS.items() if {"scheduler", "runner"} & seams.keys()]


@pytest.mark.parametrize("name", ACTING)
def test_what_acts_on_a_step_gets_no_drafts_unless_its_feature_says_so(name: str) -> None:
    assert needs_history(SamplingParams(**{name: VALUES.get(name, 1.5)})) == (name not in free_of_history())


def test_what_needs_no_history() -> None:
    assert {*LogitsRules.HOOKS, "prompt_logprobs"} == free_of_history()
    plain = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=1, logprobs=3, stop=["a"], lora="x")
    assert not needs_history(plain)


def test_a_feature_that_says_nothing_gets_no_drafts() -> None:
    class Own:
        __slots__ = ()
        HOOKS: ClassVar[dict[str, dict[str, str]]] = {"own": {"runner": "a:B"}}
        own: int = 0

    kind = struct_of(SamplingParams, [Own])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stage03_engine.sampling_params._DEFAULTS", kind())
        assert needs_history(kind(own=1)) and not needs_history(kind())


def test_defaults_of_the_lookup_lengths() -> None:
    def lengths(**spec: object) -> tuple[int, int]:
        config = config_of(num_speculative_tokens=2, **spec).speculative_config
        return config.prompt_lookup_min, config.prompt_lookup_max

    assert lengths() == (5, 5)
    assert lengths(prompt_lookup_max=3) == (3, 3)
    assert lengths(prompt_lookup_min=2) == (2, 2)
    assert lengths(prompt_lookup_min=2, prompt_lookup_max=4) == (2, 4)
    assert EngineArgs.from_kwargs(model="gpt2-tiny").speculative_config.method is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "give a method .'ngram'., or a model that drafts"),
        (
            {"method": "lookup", "num_speculative_tokens": 2},
            "method must be one of ngram, draft_model, medusa, eagle, not 'lookup'",
        ),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "method 'eagle3' .a head on .* is not built"),
        ({"method": "ngram"}, "num_speculative_tokens must be an integer in \\[1, 128\\], not None"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be .* not 0"),
        ({"method": "ngram", "num_speculative_tokens": 129}, "num_speculative_tokens must be .* not 129"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be .* not True"),
        ({"method": "ngram", "num_speculative_tokens": float("nan")}, "num_speculative_tokens must be .* not nan"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 0}, "prompt_lookup_min must be"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": "4"}, "prompt_lookup_max must be"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min 4 is more than prompt_lookup_max 3",
        ),
        ({"method": "ngram", "num_speculative_token": 2}, "unknown key .*did you mean num_speculative_tokens"),
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_an_impossible_configuration_is_refused_by_key(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs.from_kwargs(model="gpt2-tiny", speculative_config=spec)
