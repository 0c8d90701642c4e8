"""The Triton sampler, interpreted: its noise, its distribution, and that a draw knows nothing of the batch. (Each transform against its
torch twin: `python -m stage04_kernels check`.)"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from stage04_kernels.features.logits_processors import Penalties, apply_penalties
from stage04_kernels.lab import sampler_reference
from stage04_kernels.lab.check_triton import draw_slowly
from stage04_kernels.sampler import SamplingMetadata, gather_logprobs, sample
from stage04_kernels.triton_kernels.logprobs import gather_logprobs_triton
from stage04_kernels.triton_kernels.sampler import sample_triton


def test_philox_gives_the_published_words() -> None:
    """The known answers of Random123, the authors' library."""
    everything = 2**32 - 1
    assert sampler_reference.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    full = sampler_reference.philox((everything,) * 4, (everything, everything))
    assert full == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = sampler_reference.philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """600 seeds over four tokens: each frequency within four standard deviations."""
    probs, draws = torch.tensor([0.5, 0.3, 0.15, 0.05]), 600
    logits = probs.log().expand(draws, 4).contiguous()
    tokens = sample_triton(logits, torch.ones(draws), torch.arange(draws), torch.zeros(draws, dtype=torch.int64))
    for token, prob in enumerate(probs.tolist()):
        frequency = (tokens == token).float().mean().item()
        assert abs(frequency - prob) < 4 * math.sqrt(prob * (1 - prob) / draws)


@settings(max_examples=settings().max_examples // 4)
@given(st.data(), st.integers(1, 300), st.integers(1, 5))
def test_a_draw_depends_on_its_row_alone(data: st.DataObject, vocab: int, rows: int) -> None:
    """Any rows in any order, with and without neighbours: seed, position and logits decide."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    temperature = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=rows, max_size=rows)))
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 10_000, (rows,), generator=generator)
    top_k = torch.randint(0, 20, (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator) * 0.9 + 0.1
    everything = (logits, temperature, seeds, positions, top_k, top_p)
    together = sample_triton(*everything)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    assert torch.equal(sample_triton(*(x[order] for x in everything)), together[order])
    assert torch.equal(sample_triton(*(x[:1] for x in everything)), together[:1])


@pytest.mark.slow(keep=("6-0.7-True", "0-0.55"))
@pytest.mark.parametrize(
    ("top_k", "top_p", "penalised"),
    [(0, 0.55, False), (5, 0.8, False), (5, 1.0, False), (0, 1.0, True), (6, 0.7, True)],
)
def test_many_draws_from_a_row_full_of_ties_are_the_slow_ones(top_k: int, top_p: float, penalised: bool) -> None:
    """20 seeds for one row: which of several equal logits may be drawn shows, and so does each penalty."""
    rows = 20
    logits = torch.tensor([2.0, 1.0, 2.0, 0.0, 1.0, 2.0, 1.0, 0.0, 2.0, 1.0]).expand(rows, 10).contiguous()
    one, seeds, zero = torch.ones(rows), torch.arange(rows) * 977, torch.zeros(rows, dtype=torch.int64)
    k, p = torch.full((rows,), top_k), torch.full((rows,), top_p)
    penalties = None
    if penalised:
        counts = torch.tensor([3.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0]).expand(rows, 10)
        same = torch.ones(rows)
        in_prompt = torch.arange(10) % 2 == 0
        penalties = Penalties(
            torch.arange(rows), in_prompt.expand(rows, 10), counts, 1.2 * same, 0.3 * same, 0.6 * same
        )
    left = logits if penalties is None else apply_penalties(logits, penalties)
    wanted = draw_slowly(left, one, seeds, zero, k, p, None)
    assert torch.equal(sample_triton(logits, one, seeds, zero, k, p, penalties=penalties), wanted)
    assert len(set(wanted.tolist())) > 2


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 999), st.integers(1, 200), st.integers(0, 30))
def test_logprobs_equal_those_of_torch(seed: int, vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator)
    tokens = torch.randint(vocab, (3,), generator=generator)
    count = min(count, vocab)
    for ours, theirs in zip(gather_logprobs_triton(logits, tokens, count), gather_logprobs(logits, tokens, count)):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_of_equal_logits_the_first_is_taken_and_listed_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert sample_triton(logits, torch.zeros(1), zero, zero).tolist() == [1]
    ids, _, ranks = gather_logprobs_triton(logits, torch.tensor([3]), 2)
    assert ids.tolist() == [[3, 1, 2]] and ranks.tolist() == [1]


def test_the_samplers_entry_point_takes_this_path() -> None:
    """`sample` with the backend triton-interpret: greedy rows as ever, random ones by the Philox noise, the largest seed included."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    metadata = SamplingMetadata.from_lists(
        [0.0, 1.0, 1.0], [0] * 3, [1.0] * 3, [0.0] * 3, [0, 5, 2**64 - 1], [0, 3, 4], 2
    )
    output = sample(logits, metadata, "triton-interpret")
    noise = [sampler_reference.gumbel(seed, position, 40) for seed, position in ((5, 3), (2**64 - 1, 4))]
    wanted = [int(logits[0].argmax()), *(int((logits[i + 1] + torch.tensor(noise[i])).argmax()) for i in range(2))]
    assert output.sampled_token_ids.tolist() == wanted
    assert output.logprobs is not None and output.logprobs.shape == (3, 3)


def test_penalties_may_be_columns_of_a_wider_tensor() -> None:
    """As a batch brings them: each row has its own three factors."""
    logits, zero = torch.tensor([[3.0, 2.5, 0.0]] * 2), torch.zeros(2, dtype=torch.int64)
    factors = torch.tensor([[1.0, 1.0, 0.0], [4.0, 0.0, 0.0]])  # repetition, frequency, presence
    counts = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    penalties = Penalties(torch.arange(2), counts.bool(), counts, *factors.unbind(1))
    wanted = apply_penalties(logits, penalties).argmax(1)
    assert wanted.tolist() == [0, 1]
    assert torch.equal(sample_triton(logits, torch.zeros(2), zero, zero, penalties=penalties), wanted)
