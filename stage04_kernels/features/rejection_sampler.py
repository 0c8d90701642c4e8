"""Which draft tokens are accepted (vLLM: RejectionSampler in v1/sample/rejection_sampler.py; Leviathan et al. 2023, Chen et al. 2023).

Rejection sampling turns guesses into exact samples. A draft d is accepted with probability min(1, p(d) / q(d)), else a token
is drawn from the excess of p over q. Prompt lookup is certain of its guess, q(d) = 1. Then it reads: accept d with probability
p(d), else draw from p without d. And that is what happens when a token is drawn from p and compared with d: it *is* d
with probability p(d), and if not, it is distributed as p without d.

So every position is sampled as if there were no drafts, by the ordinary sampler, with all its transforms. Since a
draw is a function of its seed, its position and its logits, even the tokens are the same as without drafts.
The textbook form is the slow twin, `sampler_reference.verify_draft`.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_DRAFT = -1


def num_accepted(sampled: Tensor, drafts: list[list[int]]) -> list[int]:
    """How many drafts of each request are accepted: all before the first that differs from the token sampled in its place.

    sampled  [num_positions] int64: for a request with k drafts k + 1 positions, one after the other. The first is sampled
             after the request's own last token, the next after its first draft, and so on.
    drafts   per request, perhaps empty
    With n drafts accepted, the first n + 1 samples of the request are its new tokens: the last of them replaces the
    rejected draft or, after the last draft, is the bonus token.
    """
    longest = max((len(draft) for draft in drafts), default=0)
    if longest == 0:
        return [0] * len(drafts)
    padded = torch.tensor([draft + [NO_DRAFT] * (longest - len(draft)) for draft in drafts], device=sampled.device)
    counts = torch.tensor([len(draft) + 1 for draft in drafts], device=sampled.device)
    first = counts.cumsum(0) - counts  # [num_requests]: the first position of each
    places = first[:, None] + torch.arange(longest, device=sampled.device)  # [num_requests, longest]
    equal = sampled[places.clamp(max=len(sampled) - 1)] == padded  # padding differs from every token
    return equal.long().cumprod(dim=1).sum(dim=1).tolist()
