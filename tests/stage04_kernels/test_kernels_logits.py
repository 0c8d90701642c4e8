"""Masks, biases and penalties against their slow twins; frequencies of 50,000 draws against the twins'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from stage04_kernels.features.logits_processors import (
    LogitsRules,
    Pairs,
    Penalties,
    apply_forbidden,
    apply_rules,
    forbidden_by_bad_words,
)
from stage04_kernels.lab import logits_reference, sampler_reference as reference
from stage04_kernels.lab.check_sampling import random_logits
from stage04_kernels.lab.logits_cases import apply_rules_reference, random_rules
from stage04_kernels.sampler import SamplingMetadata, sample

NUM_DRAWS, VOCAB = 50_000, 12
LOGITS = [2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.2, -0.5, -1.0, -1.5, -2.0, -4.0]


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), vocab=st.integers(2, 40))
def test_all_rules_equal_their_twins_row_by_row(seed: int, rows: int, vocab: int) -> None:
    logits = random_logits(seed, rows, vocab)
    rules, plain = random_rules(seed, rows, vocab)
    slow = [apply_rules_reference(row, params) for row, params in zip(logits.tolist(), plain)]
    before = logits.clone()
    fast = apply_rules(logits, rules)
    torch.testing.assert_close(fast, torch.tensor(slow), atol=1e-5, rtol=1e-5)
    assert torch.equal(logits, before), "the raw logits are still needed for the logprobs"


def test_the_order_of_the_rules() -> None:
    """Bias comes before penalties: a negative logit that a bias makes positive is divided, not multiplied."""
    one = torch.tensor([0])
    penalties = Penalties(one, torch.tensor([[True, False]]), torch.zeros(1, 2), *torch.tensor([[2.0], [0.0], [0.0]]))
    rules = LogitsRules(bias=(Pairs(one, one), torch.tensor([3.0])), penalties=penalties)
    assert apply_rules(torch.tensor([[-1.0, 0.0]]), rules).tolist() == [[1.0, 0.0]]


def test_a_row_never_loses_its_last_token() -> None:
    pairs = Pairs(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    assert apply_forbidden(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), pairs).tolist() == [[1.0, 2.0], [-math.inf, 2.0]]


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5),
    output=st.lists(st.integers(0, 2), max_size=8),
)
def test_bad_words_are_stopped_at_their_last_token(words: list[list[int]], output: list[int]) -> None:
    assert set(forbidden_by_bad_words(words, output)) == logits_reference.bad_words(words, output)


def expected(params: dict[str, Any]) -> list[float]:
    logits = list(LOGITS)
    if "penalties" in params:
        logits = logits_reference.penalties(logits, *params["penalties"])
    logits = reference.temperature(logits, params.get("temperature", 1.0))
    for name in ("min_p", "top_k", "top_p"):
        if name in params:
            logits = getattr(reference, name)(logits, params[name])
    return reference.softmax(logits)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.7, "min_p": 0.02, "top_k": 6, "top_p": 0.9},
    {"penalties": ([0, 1, 9], [2, 2, 2, 5], 1.3, 0.4, 0.3)},
    {"penalties": ([0, 1], [0, 3, 3], 0.8, -0.5, 1.0), "temperature": 1.4, "top_p": 0.95},
]


@pytest.mark.slow(keep=("'min_p': 0.02", "'top_p': 0.95"))
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square over the tokens that may come, none of the others, one seed at 50,000 positions."""
    rules = None
    if "penalties" in params:
        prompt, output, *three = params["penalties"]
        counts = torch.tensor(output).bincount(minlength=VOCAB).float().expand(NUM_DRAWS, -1)
        in_prompt = (torch.tensor(prompt).bincount(minlength=VOCAB) > 0).expand(NUM_DRAWS, -1)
        values = [torch.full((NUM_DRAWS,), value) for value in three]
        rules = LogitsRules(penalties=Penalties(torch.arange(NUM_DRAWS), in_prompt, counts, *values))
    metadata = SamplingMetadata.from_lists(
        [params.get("temperature", 1.0)] * NUM_DRAWS,
        [params.get("top_k", 0)] * NUM_DRAWS,
        [params.get("top_p", 1.0)] * NUM_DRAWS,
        [params.get("min_p", 0.0)] * NUM_DRAWS,
        [5] * NUM_DRAWS,
        list(range(NUM_DRAWS)),
        rules=rules,
    )
    tokens = sample(torch.tensor(LOGITS).expand(NUM_DRAWS, -1), metadata).sampled_token_ids
    seen = tokens.bincount(minlength=VOCAB).tolist()
    wanted = [p * NUM_DRAWS for p in expected(params)]
    assert not any(n for n, w in zip(seen, wanted) if w == 0.0)
    terms = [(n - w) ** 2 / w for n, w in zip(seen, wanted) if w > 0.0]
    freedom = max(1, len(terms) - 1)
    assert sum(terms) < freedom + 5 * math.sqrt(2 * freedom), "five standard deviations"
