"""A draft that draws changes nothing that is drawn: neither coupled by the noise nor by the textbook's rejection. 100,000 draws, and how many stand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stage04_kernels import sampler
from stage04_kernels.features.logits_processors import LogitsRules, Penalties
from stage04_kernels.features.rejection_sampler import ACCEPT_NOISE, num_accepted, propose, reject, reject_rows
from stage04_kernels.lab import logits_reference, sampler_reference as reference
from stage04_kernels.sampler import SamplingMetadata, random_words, sample

DRAWS, VOCAB, POSITION = 100_000, 6, 7
TARGET = [2.0, 1.0, 0.5, 0.0, -1.0, -1.5]
DRAFT = [1.2, 1.6, -0.5, 0.4, -2.0, 0.2]
CRITICAL = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74}  # 99.99 % points of chi-square
CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-p": {"top_p": 0.8},
    "top-k and min-p": {"top_k": 4, "min_p": 0.1},
    "penalties": {
        "penalties": ([0, 2], [0, 0, 1], 1.4, 0.3, 0.2)
    },  # in the prompt; in the output; repetition, frequency, presence
}


@pytest.fixture(scope="module", autouse=True)
def noise_is_made_once() -> Iterator[None]:
    """The same 100,000 rows of noise in each case."""
    made: dict[tuple[int, ...], Tensor] = {}

    def remembered(seeds: list[int], positions: list[int], vocab: int, device: torch.device) -> Tensor:
        key = (seeds[0], seeds[-1], len(seeds), positions[0], positions[-1], vocab)
        if key not in made:
            words = random_words(vocab, torch.tensor(seeds), torch.tensor(positions))
            made[key] = ((words >> 9).float() + 0.5).div_(2**23).log_().neg_()
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "exponential_noise", remembered)
        yield


def metadata_of(case: dict[str, Any]) -> SamplingMetadata:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | {
        k: v for k, v in case.items() if k != "penalties"
    }
    rules = None
    if "penalties" in case:
        prompt, output, *factors = case["penalties"]
        seen = torch.tensor([token in prompt for token in range(VOCAB)]).repeat(DRAWS, 1)
        counts = torch.tensor([float(output.count(token)) for token in range(VOCAB)]).repeat(DRAWS, 1)
        rules = LogitsRules(
            penalties=Penalties(torch.arange(DRAWS), seen, counts, *(torch.full((DRAWS,), f) for f in factors))
        )
    return SamplingMetadata.from_lists(
        **{name: [value] * DRAWS for name, value in values.items()},
        seeds=list(range(DRAWS)), positions=[POSITION] * DRAWS, rules=rules,
    )  # fmt: skip


def distribution(logits: list[float], case: dict[str, Any]) -> list[float]:
    """What is drawn from, by the slow twins."""
    if "penalties" in case:
        prompt, output, *factors = case["penalties"]
        logits = logits_reference.penalties(logits, prompt, output, *factors)
    logits = reference.temperature(logits, case.get("temperature", 1.0))
    logits = reference.min_p(logits, case.get("min_p", 0.0))
    logits = reference.top_k(logits, case.get("top_k", 0))
    return reference.softmax(reference.top_p(logits, case.get("top_p", 1.0)))


def assert_drawn_from(probs: list[float], tokens: Tensor) -> None:
    counts, expected = tokens.bincount(minlength=VOCAB).tolist(), [len(tokens) * p for p in probs]
    assert all(count == 0 for count, e in zip(counts, expected) if e == 0), "an impossible token came"
    total = sum((count - e) ** 2 / e for count, e in zip(counts, expected) if e > 0)
    assert total < CRITICAL[sum(e > 0 for e in expected) - 1]


def assert_rate(stands: Tensor, rate: float) -> None:
    assert float(stands.double().mean()) == pytest.approx(rate, abs=5 * math.sqrt(0.25 / len(stands)))


@pytest.mark.slow(keep=("min-p", "penalties"))
@pytest.mark.parametrize("name", CASES)
def test_coupled_drafts_leave_each_token_and_stand_often(name: str) -> None:
    """The target's tokens do not look at the draft at all. Both draw the same one with probability sum 1 / sum max(p_j / p_i, q_j / q_i)."""
    case = CASES[name]
    metadata = metadata_of(case)
    tokens, drafts = (
        sample(torch.tensor([each]).repeat(DRAWS, 1), metadata).sampled_token_ids for each in (TARGET, DRAFT)
    )
    p, q = distribution(TARGET, case), distribution(DRAFT, case)
    assert_drawn_from(p, tokens)
    assert_drawn_from(q, drafts)
    rate = sum(1 / sum(max(x / a, y / b) for x, y in zip(p, q)) for a, b in zip(p, q) if a > 0 < b)
    assert_rate(tokens == drafts, rate)


@pytest.mark.slow(keep=("min-p", "penalties"))
@pytest.mark.parametrize("name", CASES)
def test_the_textbook_keeps_the_distribution(name: str) -> None:
    """Whatever the draft was drawn from, what comes out is the target's; drafts stand with probability sum min(p, q)."""
    case = CASES[name]
    metadata = metadata_of(case)
    drafts, probs = propose(torch.tensor([DRAFT]).repeat(DRAWS, 1), metadata)
    logits = torch.tensor([TARGET]).repeat(DRAWS, 1)
    if metadata.rules is not None:
        logits = metadata.rules.apply(logits, penalties=True)
    forced = reject_rows(logits, metadata, list(range(DRAWS)), probs, drafts)
    tokens = sample(forced, metadata_of({k: v for k, v in case.items() if k != "penalties"})).sampled_token_ids
    p, q = distribution(TARGET, case), distribution(DRAFT, case)
    assert_drawn_from(q, drafts)
    assert_drawn_from(p, tokens)
    stands = tokens == drafts
    assert_rate(stands, sum(map(min, p, q)))
    assert stands.tolist() == [
        bool(n) for n in num_accepted(torch.stack([tokens, tokens], 1).flatten(), [[d] for d in drafts.tolist()])
    ]


@pytest.mark.slow(keep=("min-p", "penalties"))
@pytest.mark.parametrize("name", CASES)
def test_a_draft_that_knows_none_of_the_allowed_tokens_changes_nothing(name: str) -> None:
    """As heads may, which know a part of the vocabulary."""
    metadata = metadata_of(CASES[name])
    drafts, probs = propose(torch.full((DRAWS, len(TARGET)), -torch.inf), metadata)
    assert probs.isfinite().all() and (probs.sum(dim=-1) == 1).all()
    logits = torch.tensor([TARGET]).repeat(DRAWS, 1)
    if metadata.rules is not None:
        logits = metadata.rules.apply(logits, penalties=True)
    forced = reject_rows(logits, metadata, list(range(DRAWS)), probs, drafts)
    tokens = sample(forced, metadata_of({k: v for k, v in CASES[name].items() if k != "penalties"})).sampled_token_ids
    assert_drawn_from(distribution(TARGET, CASES[name]), tokens)


def test_the_textbook_row_by_row() -> None:
    """`reject` against its slow twin, for drafts that stand and that fall; greedy rows are left to the sampler."""
    generator, rows = torch.Generator().manual_seed(3), 300
    logits, other = (torch.randn(rows, VOCAB, generator=generator) for _ in range(2))
    seeds, positions = torch.arange(rows) * 7919, torch.arange(rows) % 11
    probs = other.softmax(-1)
    drafts = torch.multinomial(probs, 1, generator=generator)[:, 0]
    tokens = reject(logits, probs, drafts, seeds, positions)
    coins = ((random_words(1, seeds ^ ACCEPT_NOISE, positions)[:, 0] >> 9).double() + 0.5) / 2**23
    noise = sampler.exponential_noise(seeds.tolist(), positions.tolist(), VOCAB, torch.device("cpu"))
    fell = 0
    for row in range(rows):
        p, q = logits[row].softmax(-1).tolist(), probs[row].tolist()
        stands, token = reference.reject(p, q, int(drafts[row]), float(coins[row]), noise[row].tolist())
        assert int(tokens[row]) == token and (token == int(drafts[row])) == stands
        fell += not stands
    assert 50 < fell < 200
    greedy = SamplingMetadata.greedy(rows)
    assert torch.equal(reject_rows(logits, greedy, list(range(rows)), probs, drafts), logits)
    same = reject(logits, logits.softmax(-1), drafts, seeds, positions)
    assert torch.equal(same, drafts), "equal distributions: every draft stands"
