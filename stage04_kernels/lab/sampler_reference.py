"""The slow twins of sampler.py: one row at a time, sorted lists and sums in plain Python's double precision.

vLLM has no counterpart file. Each function takes one row of logits as a list and returns what it must become.
"""

from __future__ import annotations

import math

NEVER = -math.inf


def softmax(logits: list[float]) -> list[float]:
    """Probabilities of one row."""
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def log_softmax(logits: list[float]) -> list[float]:
    """Log-probabilities of one row."""
    largest = max(logits)
    log_total = largest + math.log(math.fsum(math.exp(x - largest) for x in logits))
    return [x - log_total for x in logits]


def descending(values: list[float]) -> list[int]:
    """Indices from the largest value down; of equal values the lower index first."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))


def temperature(logits: list[float], value: float) -> list[float]:
    """Twin of `apply_temperature`."""
    return [x / value for x in logits]


def min_p(logits: list[float], value: float) -> list[float]:
    """Twin of `apply_min_p`."""
    probs = softmax(logits)
    threshold = value * max(probs)
    return [x if p >= threshold else NEVER for x, p in zip(logits, probs)]


def top_k(logits: list[float], value: int) -> list[float]:
    """Twin of `apply_top_k`."""
    if value <= 0:
        return list(logits)
    kept = set(descending(logits)[:value])
    return [x if index in kept else NEVER for index, x in enumerate(logits)]


def top_p(logits: list[float], value: float) -> list[float]:
    """Twin of `apply_top_p`."""
    if value >= 1.0:
        return list(logits)
    probs = softmax(logits)
    kept: set[int] = set()
    mass = 0.0
    for index in descending(logits):
        kept.add(index)
        mass += probs[index]
        if mass >= value:
            break
    return [x if index in kept else NEVER for index, x in enumerate(logits)]


def logprobs(logits: list[float], token_id: int, count: int) -> tuple[list[int], list[float], int]:
    """Twin of `gather_logprobs`: token ids and log-probabilities, sampled token first, and its rank."""
    values = log_softmax(logits)
    ids = [token_id, *descending(logits)[:count]]
    rank = 1 + sum(x > logits[token_id] for x in logits)
    return ids, [values[index] for index in ids], rank


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): four random 32-bit words from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 % 2**32, (product0 >> 32) ^ c3 ^ k1, product0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, vocab: int) -> list[float]:
    """Twin of the Triton sampler's noise: four tokens from each Philox counter (token // 4, position, 0, 0)."""
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = [word for group in range(-(-vocab // 4)) for word in philox((group, position, 0, 0), key)]
    return [-math.log(-math.log(((word >> 9) + 0.5) / 2**23)) for word in words[:vocab]]


def token_bitmask(logits: list[float], words: list[int]) -> list[float]:
    """Twin of `apply_token_bitmask` for one row: bit t % 32 of word t // 32 says whether token t is allowed."""
    return [x if words[token // 32] % 2**32 // 2 ** (token % 32) % 2 else NEVER for token, x in enumerate(logits)]


def verify_draft(logits: list[float], noise: list[float], draft: int) -> tuple[bool, int]:
    """Twin of a draft position: (accepted?, the token at that position). `logits` have been through the transforms.

    The draft is accepted if it arrives before all others, which has probability p(draft). Otherwise the others, with
    the draft removed and the rest renormalised, race among themselves.
    """
    probs = softmax(logits)
    arrival = [n / p if p > 0.0 else math.inf for n, p in zip(noise, probs)]
    if all(arrival[draft] < time for token, time in enumerate(arrival) if token != draft):
        return True, draft
    return False, race([NEVER if token == draft else x for token, x in enumerate(logits)], noise)


def reject(p: list[float], q: list[float], draft: int, coin: float, noise: list[float]) -> tuple[bool, int]:
    """Twin of the textbook's draft position: (accepted?, the token there). `draft` was drawn from the probabilities q; the coin is uniform.

    It stands with probability min(1, p / q). Else the others race with what p has more than q.
    """
    if coin < min(1.0, p[draft] / q[draft]):
        return True, draft
    arrival = [n / (a - b) if a > b else math.inf for n, a, b in zip(noise, p, q)]
    return False, arrival.index(min(arrival))


def race(logits: list[float], noise: list[float]) -> int:
    """Twin of the draw in `sample_random`: the token that arrives first at time noise / probability."""
    arrival = [n / p if p > 0.0 else math.inf for n, p in zip(noise, softmax(logits))]
    return arrival.index(min(arrival))
