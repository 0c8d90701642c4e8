"""Which draft tokens are accepted (vLLM: RejectionSampler in v1/sample/rejection_sampler.py; Leviathan et al. 2023, Chen et al. 2023).

Rejection sampling turns guesses into exact samples. A draft d is accepted with probability min(1, p(d) / q(d)), else a token
is drawn from the excess of p over q. Prompt lookup is certain of its guess, q(d) = 1. Then it reads: accept d with probability
p(d), else draw from p without d. And that is what happens when a token is drawn from p and compared with d: it *is* d
with probability p(d), and if not, it is distributed as p without d.

So every position is sampled as if there were no drafts, by the ordinary sampler, with all its transforms. Since a
draw is a function of its seed, its position and its logits, even the tokens are the same as without drafts.
The textbook form is the slow twin, `sampler_reference.verify_draft`.

A model that drafts can be made as certain: it draws with the target's own noise for that position, which is fixed before either model
runs (coupling; Daliri et al. 2024). Given the noise its token is a guess like any other, and where q is near p both draw the same one.
With noise of its own (`propose`), q is a distribution again, and `reject` is the textbook: it keeps a guess a little more often, and the tokens
are others than without drafts, of the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.sampler import SamplingMetadata, random_words, sample_random, transform_rows

DRAFT_NOISE, ACCEPT_NOISE = 0x6472_6166_7400_0001, 0x6472_6166_7400_0002
"""What a seed is XORed with, so that the draft's noise and the coins of acceptance do not depend on the target's noise."""


def num_accepted(sampled: Tensor, drafts: list[list[int]]) -> list[int]:
    """How many drafts of each request are accepted: all before the first that differs from the token sampled in its place.

    sampled  [num_positions] int64: for a request with k drafts k + 1 positions, one after the other. The first is sampled
             after the request's own last token, the next after its first draft, and so on.
    drafts   per request, perhaps empty
    With n drafts accepted, the first n + 1 samples of the request are its new tokens: the last of them replaces the
    rejected draft or, after the last draft, is the bonus token.
    """
    token_ids, kept, first = sampled.tolist(), list[int](), 0
    for draft in drafts:
        agree = [token_id == guess for token_id, guess in zip(token_ids[first : first + len(draft)], draft)]
        kept.append(agree.index(False) if False in agree else len(draft))
        first += len(draft) + 1
    return kept


def propose(logits: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Drafts drawn from the draft's logits [num_rows, vocab] with noise of their own, and the distributions that they come from:
    [num_rows] int64, [num_rows, vocab] float32. A greedy row is certain of its argmax, and so is one that knows none of the tokens that the rules
    allow, as may be where a draft has a part of the vocabulary: the target then takes nothing from it."""
    if metadata.rules is not None:
        logits = metadata.rules.apply(logits, penalties=True)
    tokens = logits.argmax(dim=-1)
    probs = torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)
    if metadata.random_rows:
        rows = torch.tensor(metadata.random_rows, device=logits.device)
        knows = logits[rows].isfinite().any(dim=-1)
        logits = transform_rows(logits[rows], rows, metadata)
        seeds, positions = (key[rows] for key in metadata.noise_keys)
        drawn = sample_random(logits, (seeds ^ DRAFT_NOISE).tolist(), positions.tolist())
        tokens[rows] = torch.where(knows, drawn, tokens[rows])
        probs[rows] = torch.where(knows[:, None], logits.softmax(dim=-1), probs[rows])
    return tokens, probs


def reject(logits: Tensor, probs: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The token at each position that has a draft, by the textbook: [num_rows] int64.

    logits  [num_rows, vocab]  what the target would draw from
    probs   [num_rows, vocab]  what the draft, [num_rows] int64, was drawn from
    seeds, positions           [num_rows] int64 each, of the request and of the token
    The draft d stands with probability min(1, p(d) / q(d)); else the token is drawn from the excess of p over q, where d has none.
    """
    p, at = logits.softmax(dim=-1), drafts[:, None]
    words = random_words(1, seeds ^ ACCEPT_NOISE, positions)[:, 0]
    coins = ((words >> 9).float() + 0.5) / 2**23  # in (0, 1)
    excess = (p - probs).clamp(min=0.0)
    stands = coins * probs.gather(1, at)[:, 0] < p.gather(1, at)[:, 0]
    stands |= excess.sum(dim=-1) == 0.0  # both are the same, but for the rounding
    others = sample_random(excess.log(), seeds.tolist(), positions.tolist())
    return torch.where(stands, drafts, others)


def reject_rows(
    logits: Tensor, metadata: SamplingMetadata, rows: list[int], probs: Tensor, drafts: Tensor
) -> Tensor:  # fmt: skip
    """The logits of a step [num_rows, vocab] after the rules, of which `rows` have drafts: there the sampler is left no other choice than the
    token that `reject` gives. Greedy rows among them keep their logits."""
    random = set(metadata.random_rows)
    chosen = [place for place, row in enumerate(rows) if row in random]
    if not chosen:
        return logits
    at = torch.tensor([rows[place] for place in chosen], device=logits.device)
    seeds, positions = (key[at] for key in metadata.noise_keys)
    tokens = reject(transform_rows(logits[at], at, metadata), probs[chosen], drafts[chosen], seeds, positions)
    forced = torch.full_like(logits[at], -torch.inf).scatter_(1, tokens[:, None], 0.0)
    return logits.index_copy(0, at, forced)
