"""From logits to the next token (vLLM: Sampler in v1/sample/sampler.py, with v1/sample/ops).

The order is vLLM's: rules (features/logits_processors.py), temperature, min-p, top-k, top-p, then one draw. Each transform takes logits
[num_rows, vocab] and returns new ones, in which what may not be drawn is -inf. The slow twin of each is in
lab/sampler_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from stage04_kernels.attention import load

RowsTransform = Callable[[Tensor, list[int]], Tensor]
"""Logits [n, vocab] of these n rows of the batch -> new ones."""

FUSED = {
    "native": "stage04_kernels.backends.native.sampler:SAMPLER_KERNELS",
    "triton": "stage04_kernels.triton_kernels.backend:SAMPLER_KERNELS",
    "triton-interpret": "stage04_kernels.triton_kernels.interpreted:SAMPLER_KERNELS",
}
"""Attention backends that bring a sampler; with every other one torch samples."""
GREEDY_BELOW = 1e-5  # temperatures below this mean greedy, as in vLLM
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def to_device(arrays: list[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """The arrays as tensors on `device`; on a GPU in one copy out of pinned memory, for which the host does not wait.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel again for pointers that do not.
    """
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    for array, part in zip(arrays, packed.split(sizes)):
        part[: array.nbytes] = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    parts = zip(arrays, packed.to(device, non_blocking=True).split(sizes))
    return [part[: a.nbytes].view(torch.from_numpy(a[:0]).dtype).view(a.shape) for a, part in parts]


class Rules(Protocol):
    """What changes the logits of a step before temperature, if a request asks for any (features/logits_processors.py)."""

    @property
    def penalties(self) -> Any:
        """For a draw that applies them itself: the penalties of the rows that have any, else None."""

    def apply(self, logits: Tensor, penalties: bool) -> Tensor:
        """Logits [num_rows, vocab] after all rules, the penalties only if `penalties`."""


@dataclass(frozen=True)
class SamplingMetadata:
    """The settings of each row. A tensor is None when its transform is off for all rows, so that it is skipped."""

    temperature: Tensor  # [num_rows] float32; 0 = greedy
    top_k: Tensor | None  # [num_rows] int64; 0 and -1 = off
    top_p: Tensor | None  # [num_rows] float32; 1 = off
    min_p: Tensor | None  # [num_rows] float32; 0 = off
    # seeds (any 64 bits), and how many tokens each has produced: [num_rows] int64 each
    noise_keys: tuple[Tensor, Tensor]
    random_rows: list[int]  # the rows that are not greedy
    max_num_logprobs: int | None = None  # None: no logprobs; 0: of the sampled token only; k: of the k most likely too
    rules: Rules | None = None  # None: no row has any
    before: list[RowsTransform] = field(default_factory=list)  # custom ones that may change which logit is largest
    after_temperature: list[RowsTransform] = field(default_factory=list)  # custom ones that never do; random rows only
    named: dict[int, list[int]] = field(default_factory=dict)  # row -> the tokens that it reports, not the likeliest

    @classmethod
    @lru_cache(maxsize=1024)
    def greedy(cls, num_rows: int, device: torch.device | str = "cpu") -> SamplingMetadata:
        """Every row takes the argmax, and none reports logprobs."""
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(zeros.float(), None, None, None, (zeros, zeros), [])

    @classmethod
    def from_lists(
        cls, temperature: ArrayLike, top_k: ArrayLike, top_p: ArrayLike, min_p: ArrayLike,
        seeds: list[int], positions: list[int], max_num_logprobs: int | None = None, device: torch.device | str = "cpu",
        rules: Rules | None = None, before: list[RowsTransform] | None = None,
        after_temperature: list[RowsTransform] | None = None, named: dict[int, list[int]] | None = None,
    ) -> SamplingMetadata:  # fmt: skip
        """Build it from one value per row, in lists or arrays. A transform is on if any random row uses it."""
        keys = np.array([[seed & _MASK64 for seed in seeds], positions], dtype=np.uint64).view(np.int64)
        k, floats = np.array(top_k, dtype=np.int64), np.array([temperature, top_p, min_p], dtype=np.float32)
        tensors = to_device([*keys, k, *floats], device)
        random = floats[0] >= GREEDY_BELOW
        return cls(
            temperature=tensors[3], top_k=tensors[2] if (k[random] > 0).any() else None,
            top_p=tensors[4] if (floats[1, random] < 1.0).any() else None,
            min_p=tensors[5] if (floats[2, random] > 0.0).any() else None,
            noise_keys=(tensors[0], tensors[1]), random_rows=random.nonzero()[0].tolist(),
            max_num_logprobs=max_num_logprobs, rules=rules, before=before or [],
            after_temperature=after_temperature or [], named=named or {},
        )  # fmt: skip


@dataclass(frozen=True)
class SamplerOutput:
    """The chosen tokens. The other three are None unless logprobs were asked for; column 0 is the sampled token, then come
    the k most likely in descending order (for a row with named tokens: those, in their order). They are taken from the raw logits,
    before any transform."""

    sampled_token_ids: Tensor  # [num_rows] int64
    logprob_token_ids: Tensor | None = None  # [num_rows, k + 1] int64
    logprobs: Tensor | None = None  # [num_rows, k + 1] float32
    ranks: Tensor | None = None  # [num_rows] int64: 1 = the sampled token was the most likely


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature [num_rows], which must be above 0."""
    return logits / temperature[:, None]


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Forbid tokens less likely than min_p [num_rows] times the most likely one (Nguyen et al. 2024)."""
    probs = logits.softmax(dim=-1)
    threshold = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probs < threshold, -torch.inf)


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top_k [num_rows] largest logits of each row, exactly that many: of equal ones the lower index stays."""
    on = (top_k > 0)[:, None]  # [num_rows, 1]
    k = torch.where(on, top_k[:, None], 1).clamp(max=logits.shape[-1])  # 1 where it is off: the search stays short
    kth = logits.topk(int(k.max()), dim=-1).values.gather(1, k - 1)  # [num_rows, 1]: the smallest logit that stays
    above, equal = logits > kth, logits == kth
    places_left = k - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1) <= places_left))
    return logits.masked_fill(on & ~keep, -torch.inf)


# Invariant: a token stays if the mass of all tokens before it, from the most likely down, is still below p. So the first
# one always stays, and the last one that stays is the one that reaches p.
def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of tokens whose mass reaches top_p [num_rows] (nucleus sampling, Holtzman et al. 2020).

    At least one token stays; of equally likely ones the lower index comes first. Only rows with top_p < 1 are sorted:
    sorting is by far the most expensive part of sampling.
    """
    rows = (top_p < 1.0).nonzero().squeeze(1)
    sorted_logits, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    probs = sorted_logits.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    kept = sorted_logits.masked_fill(mass_before >= top_p[rows, None], -torch.inf)
    result = logits.clone()
    result[rows] = torch.empty_like(kept).scatter_(1, order, kept)
    return result


def random_words(vocab: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """32 random bits for each token, [num_rows, vocab] int64, from seeds and positions [num_rows] int64: Philox4x32-10 (Salmon
    et al. 2011). The seed is the key; the counter (token // 4, position, 0, 0) gives four tokens theirs."""
    low, high = seeds[:, None] & _MASK32, seeds[:, None] >> 32 & _MASK32
    group = torch.arange(-(-vocab // 4), device=seeds.device).expand(len(seeds), -1)
    words = [group, torch.zeros_like(group) + positions[:, None], torch.zeros_like(group), torch.zeros_like(group)]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57  # 64 bits, whatever sign they are taken to have
        words = [b >> 32 & _MASK32 ^ words[1] ^ low, b & _MASK32, a >> 32 & _MASK32 ^ words[3] ^ high, a & _MASK32]
        low, high = low + 0x9E3779B9 & _MASK32, high + 0xBB67AE85 & _MASK32
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab]


def exponential_noise(seeds: list[int], positions: list[int], vocab: int, device: torch.device) -> Tensor:
    """Noise [num_rows, vocab] float32, exponentially distributed with rate 1; row i depends on seeds[i] and positions[i] only. The
    uniform numbers have 23 bits, as in the kernels. Row by row: in a logarithm over all rows rounding depends on the place."""
    keys = np.array([[seed & _MASK64 for seed in seeds], positions], dtype=np.uint64).view(np.int64)
    words = random_words(vocab, *to_device([*keys], device))
    return torch.stack([(((row >> 9).float() + 0.5) / 2**23).log_().neg_() for row in words])


def sample_random(logits: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
    """Draw one token per row from softmax(logits): [num_rows, vocab] -> [num_rows] int64.

    An exponential race: token t arrives after noise[t] / probs[t], and the first to arrive is t with probability probs[t].
    A rounding error in one probability moves only that token's time, so that a seeded draw almost never depends on
    how the logits were rounded. (In a search through the cumulative sum it would move every token after it.)
    """
    probs = logits.softmax(dim=-1)
    noise = exponential_noise(seeds, positions, logits.shape[-1], logits.device)
    return (probs / noise).argmax(dim=-1)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and log-probabilities [num_rows, min(num_logprobs, vocab) + 1] (given token first, then the likeliest), ranks."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])  # [num_rows, 1]
    best = logprobs.topk(min(num_logprobs, logits.shape[1]), dim=-1)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    return torch.cat([token_ids[:, None], best.indices], 1), torch.cat([chosen, best.values], 1), ranks


def report_named(
    logits: Tensor, token_ids: Tensor, logprobs: Tensor, named: dict[int, list[int]]
) -> tuple[Tensor, Tensor]:
    """For the rows in `named`, these tokens instead of the most likely ones, after the sampled one: [num_rows, k + 1] in,
    [num_rows, max(k, most named) + 1] out. Entries past a shorter row's own mean nothing."""
    room = max(0, max(map(len, named.values())) + 1 - token_ids.shape[1])
    token_ids = torch.nn.functional.pad(token_ids, (0, room))
    logprobs = torch.nn.functional.pad(logprobs, (0, room))
    for row, tokens in named.items():
        ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        token_ids[row, 1 : 1 + len(tokens)] = ids
        logprobs[row, 1 : 1 + len(tokens)] = logits[row].float().log_softmax(dim=-1)[ids]
    return token_ids, logprobs


def transform_rows(logits: Tensor, rows: Tensor, metadata: SamplingMetadata) -> Tensor:
    """What the random rows draw from: logits [num_random, vocab] -> the same."""
    logits = apply_temperature(logits, metadata.temperature[rows])
    for transform in metadata.after_temperature:
        logits = transform(logits, metadata.random_rows)
    if metadata.min_p is not None:
        logits = apply_min_p(logits, metadata.min_p[rows])
    if metadata.top_k is not None:
        logits = apply_top_k(logits, metadata.top_k[rows])
    if metadata.top_p is not None:
        logits = apply_top_p(logits, metadata.top_p[rows])
    return logits


@dataclass(frozen=True)
class SamplerKernels:
    """What a backend may do in fewer passes over the logits.

    draw             (logits, metadata, penalties or None): penalties, transforms and draws of all rows -> [num_rows] int64
    gather_logprobs  as the function of this name
    """

    draw: Callable[[Tensor, SamplingMetadata, Any], Tensor]
    gather_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def sample(logits: Tensor, metadata: SamplingMetadata, backend: str = "torch") -> SamplerOutput:
    """Choose the next token of each row of logits [num_rows, vocab] float32.

    Greedy rows take the argmax after the rules, the lowest index among equals. The draw of a random row is a function of
    its seed, its position and its own logits: neither the rest of the batch nor any earlier step changes it.
    """
    raw, rules = logits, metadata.rules
    kernels: SamplerKernels | None = load(FUSED[backend]) if backend in FUSED else None
    custom = metadata.before or metadata.after_temperature  # a user's own transforms come between those of a fused draw
    fuse = kernels is not None and not custom
    penalties = rules.penalties if fuse and rules is not None else None
    if rules is not None:
        logits = rules.apply(logits, penalties=penalties is None)
    for transform in metadata.before:
        logits = transform(logits, list(range(len(logits))))
    if kernels is not None and fuse:
        token_ids = kernels.draw(logits, metadata, penalties)
    else:
        token_ids = logits.argmax(dim=-1)
        if metadata.random_rows:
            rows = torch.tensor(metadata.random_rows, device=logits.device)
            keys = [key[rows].tolist() for key in metadata.noise_keys]
            token_ids[rows] = sample_random(transform_rows(logits[rows], rows, metadata), *keys)
    if metadata.max_num_logprobs is None:
        return SamplerOutput(token_ids)
    gather = gather_logprobs if kernels is None else kernels.gather_logprobs
    likely, logprobs, ranks = gather(raw, token_ids, metadata.max_num_logprobs)
    if metadata.named:
        likely, logprobs = report_named(raw, likely, logprobs, metadata.named)
    return SamplerOutput(token_ids, likely, logprobs, ranks)
