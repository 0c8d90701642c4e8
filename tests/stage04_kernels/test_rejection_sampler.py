"""Drafts do not change what is drawn: token for token against the textbook, and the distribution by a chi-square test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from stage04_kernels.features.rejection_sampler import num_accepted
from stage04_kernels.lab import sampler_reference as reference
from stage04_kernels.sampler import SamplingMetadata, exponential_noise, sample

DRAWS = 60_000
VOCAB = 6


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6), st.data())
def test_accepted_is_the_common_beginning(drafts: list[list[int]], data: st.DataObject) -> None:
    sampled = [data.draw(st.lists(st.integers(0, 2), min_size=len(d) + 1, max_size=len(d) + 1)) for d in drafts]
    expected = []
    for draft, tokens in zip(drafts, sampled):
        count = 0
        while count < len(draft) and draft[count] == tokens[count]:
            count += 1
        expected.append(count)
    flat = torch.tensor([token for tokens in sampled for token in tokens], dtype=torch.int64)
    assert num_accepted(flat, drafts) == expected


@given(
    st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=8),
    st.integers(0, 7),
    st.integers(0, 2**63 - 1),
    st.integers(0, 100),
)
def test_drawing_and_comparing_is_rejection_sampling(logits: list[float], draft: int, seed: int, position: int) -> None:
    draft %= len(logits)
    metadata = SamplingMetadata.from_lists([1.0], [0], [1.0], [0.0], [seed], [position])
    token = int(sample(torch.tensor([logits]), metadata).sampled_token_ids)
    noise = exponential_noise([seed], [position], len(logits), torch.device("cpu"))[0].tolist()
    assert reference.verify_draft(logits, noise, draft) == (token == draft, token)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    assert not counts[probs == 0].any(), "an impossible token came"
    return float(((counts - expected) ** 2 / expected)[probs > 0].sum())


# The 99.99 % points of chi-square with 1..5 degrees of freedom.
CRITICAL = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74}

TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
}


@pytest.mark.slow(keep="top-p")
@pytest.mark.parametrize("setting", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_the_distribution_is_the_targets(setting: dict) -> None:
    """Two positions, one draft: the first new token is distributed as p; the bonus token, when it comes, too."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -1.5], [0.0, 0.3, -1.0, 1.0, 0.2, 0.1]])
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
    rows = 2 * DRAWS
    metadata = SamplingMetadata.from_lists(
        **{name: [value] * rows for name, value in values.items()},
        seeds=[seed // 2 for seed in range(rows)],
        positions=[7 + row % 2 for row in range(rows)],
    )
    sampled = sample(logits.repeat(DRAWS, 1), metadata).sampled_token_ids
    target = []
    for row in logits.tolist():
        kept = reference.temperature(row, values["temperature"])
        kept = reference.min_p(kept, values["min_p"])
        kept = reference.top_k(kept, values["top_k"])
        target.append(torch.tensor(reference.softmax(reference.top_p(kept, values["top_p"])), dtype=torch.float64))
    first, bonus = sampled.view(DRAWS, 2).unbind(1)
    for draft in (0, 1, 5):  # a likely one, and down to an unlikely or impossible one
        accepted = torch.tensor(num_accepted(sampled, [[draft]] * DRAWS))
        rate = float(accepted.double().mean())
        assert rate == pytest.approx(float(target[0][draft]), abs=5 * (0.25 / DRAWS) ** 0.5), (
            "accepted too often or rarely"
        )
        rejected = target[0].clone()  # the draft removed, the rest renormalised
        rejected[draft] = 0.0
        cases = [
            (first, target[0]),
            (first[accepted == 0], rejected / rejected.sum()),
            (bonus[accepted == 1], target[1]),
        ]
        for tokens, probs in cases:
            degrees = int((probs > 0).sum()) - 1
            if len(tokens) > 500 and degrees:
                assert chi_square(tokens.bincount(minlength=VOCAB).double(), probs) < CRITICAL[degrees]
