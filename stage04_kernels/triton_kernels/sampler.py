"""The sampler in Triton: penalties, temperature, min-p, top-k, top-p and the draw in one kernel (vLLM: v1/sample/ops,
FlashInfer's sampling kernels). One program per row.

**No sort.** Top-k needs the k-th largest logit, top-p the largest logit at which the mass reaches p. Both are a search for a threshold, and
floats can be searched by their bits: with the sign folded in (`_ordered`), a larger float is a larger unsigned number. `_find_threshold`
fixes four bits per pass over the row, from the top: it adds up the weight of the candidates in each of 16 bins and takes the
bin in which the target falls. Eight passes give the exact number, whatever the row's size. With weight 1 per token it
finds top-k, with the token's probability top-p.

**The draw** is an exponential race, as in sampler.py: token t arrives after noise[t] / p[t], and the first one wins. In logarithms: the
largest logit[t] - log(noise[t]) wins (the Gumbel-max trick), so nobody needs the softmax. The noise is counter-based (Philox, Salmon et al. 2011):
a function of the request's seed, its position and the token, with no state to keep and no order to respect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.sampler import SamplingMetadata
from stage04_kernels.triton_kernels.tiles import INTERPRETED

if TYPE_CHECKING:
    from stage04_kernels.features.logits_processors import Penalties

TILE = 8192 if INTERPRETED else 2048
SEARCH_TILE = 8192 if INTERPRETED else 1024


@triton.jit
def _ordered(x):
    """float32 -> uint32 in the same order: flip all bits of a negative number, the sign of a positive one."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _unordered(key):
    """The float32 of a key."""
    return tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _load_logits(
    logits_ptr, prompt_ptr, counts_ptr, at, real, inverse_temperature, repetition, frequency, presence,
    HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Logits of a row at these tokens, after penalties and temperature; -inf past its end."""
    x = tl.load(logits_ptr + at, mask=real, other=float("-inf"))
    if HAS_PENALTIES:
        counts = tl.load(counts_ptr + at, mask=real, other=0.0)
        in_prompt = tl.load(prompt_ptr + at, mask=real, other=0)
        seen = (in_prompt != 0) | (counts > 0.0)
        x = tl.where(seen, tl.where(x > 0.0, x / repetition, x * repetition), x)
        x = x - frequency * counts - presence * (counts > 0.0).to(tl.float32)
    return x * inverse_temperature


@triton.jit
def _find_threshold(
    logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
    largest, floor, floor_weight, target,
    BY_MASS: tl.constexpr, HAS_PENALTIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest key t with weight(keys >= t) >= target, and weight(keys > t).

    A token weighs 1, or with BY_MASS exp(logit - largest). Keys below `floor` weigh nothing, and those equal to it `floor_weight` times
    as much: of equal logits an earlier search may have kept only some.
    """
    bins = tl.arange(0, 16)
    prefix = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    known = tl.full([], 0, tl.uint32)  # a mask of the bits found so far
    for digit_index in range(8):
        shift = 28 - 4 * digit_index
        weight_in_bin = tl.zeros([16], tl.float32)
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            real = at < vocab
            x = _load_logits(
                logits_ptr, prompt_ptr, counts_ptr, at, real, inverse_temperature, repetition, frequency, presence,
                HAS_PENALTIES,
            )  # fmt: skip
            key = _ordered(x)
            weight = tl.exp(x - largest) if BY_MASS else tl.where(real, 1.0, 0.0)
            weight = tl.where(key < floor, 0.0, tl.where(key == floor, weight * floor_weight, weight))
            weight = tl.where(real & ((key & known) == prefix), weight, 0.0)
            digit = ((key >> shift) & 15).to(tl.int32)
            weight_in_bin += tl.sum(tl.where(digit[None, :] == bins[:, None], weight[None, :], 0.0), 1)
        from_bin_up = above + tl.sum(weight_in_bin, 0) - tl.cumsum(weight_in_bin, 0) + weight_in_bin
        chosen = tl.max(tl.where(from_bin_up >= target, bins, 0), 0)
        above += tl.sum(tl.where(bins > chosen, weight_in_bin, 0.0), 0)
        prefix = prefix | (chosen.to(tl.uint32) << shift)
        known = (known >> 4) | 0xF0000000
    return prefix, above


@triton.jit
def _after_top_p(
    logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
    largest, floor, places, top_p,
    HAS_PENALTIES: tl.constexpr, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr,
):  # fmt: skip
    """The floor, and the places at it, that top-p leaves of what earlier transforms kept, whose mass counts as 1."""
    mass = tl.full([], 0.0, tl.float32)  # above the floor, in units of the largest logit's weight
    at_floor = tl.full([], 0.0, tl.float32)  # how many logits are equal to it
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = _load_logits(
            logits_ptr, prompt_ptr, counts_ptr, at, at < vocab, inverse_temperature, repetition, frequency, presence,
            HAS_PENALTIES,
        )  # fmt: skip
        key = _ordered(x)
        mass += tl.sum(tl.where(key > floor, tl.exp(x - largest), 0.0), 0)
        at_floor += tl.sum(((key == floor) & (at < vocab)).to(tl.float32), 0)
    floor_weight = tl.minimum(places.to(tl.float32) / tl.maximum(at_floor, 1.0), 1.0)
    each_at_floor = tl.where(at_floor > 0.0, tl.exp(_unordered(floor) - largest), 0.0)
    target = top_p * (mass + at_floor * floor_weight * each_at_floor)
    found, above = _find_threshold(
        logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
        largest, floor, floor_weight, target, True, HAS_PENALTIES, SEARCH_TILE,
    )  # fmt: skip
    needed = tl.ceil((target - above) / tl.exp(_unordered(found) - largest))
    needed = tl.minimum(tl.maximum(needed, 1.0), 2147483520.0).to(tl.int32)
    return tl.maximum(found, floor), tl.where(found > floor, needed, tl.minimum(places, needed))


@triton.jit
def _gumbel(seed, position, start, TILE: tl.constexpr):
    """Gumbel noise of the tokens start .. start + TILE - 1 (start is a multiple of 4): the Philox counter (token // 4, position, 0, 0) gives four."""
    group = (start // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zero = group * 0
    a, b, c, d = tl.philox(seed, group, zero + position.to(tl.uint32), zero, zero)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TILE])  # a, b, c, d, a, b, ...
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)  # 23 bits: in (0, 1), neither end
    return -tl.log(-tl.log(uniform))


@triton.jit
def _keep(
    logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
    row, top_k_ptr, top_p_ptr, min_p_ptr,
    HAS_PENALTIES: tl.constexpr, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr,
):  # fmt: skip
    """What min-p, top-k and top-p leave of a row: keys below the floor are out, of those equal to it the first `places` stay."""
    floor = tl.full([], 0, tl.uint32)
    places = tl.full([], 2147483647, tl.int32)
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = _load_logits(
            logits_ptr, prompt_ptr, counts_ptr, at, at < vocab, inverse_temperature, repetition, frequency, presence,
            HAS_PENALTIES,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(x, 0))
    min_p = tl.load(min_p_ptr + row)
    if min_p > 0.0:
        floor = _ordered(largest + tl.log(min_p))
    top_k = tl.load(top_k_ptr + row)
    if top_k > 0:
        target = tl.minimum(top_k, vocab).to(tl.float32)
        found, above = _find_threshold(
            logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
            largest, floor, 1.0, target, False, HAS_PENALTIES, SEARCH_TILE,
        )  # fmt: skip
        if found >= floor:  # else min-p has left fewer than k
            floor = found
            places = (target - above).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        floor, places = _after_top_p(
            logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
            largest, floor, places, top_p, HAS_PENALTIES, TILE, SEARCH_TILE,
        )  # fmt: skip
    return floor, places


@triton.jit
def _draw(
    logits_ptr, prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
    floor, places, greedy, seed, position,
    HAS_FILTERS: tl.constexpr, HAS_PENALTIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token with the largest logit, or with the largest sum of logit and noise; of equal ones the first."""
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)  # to the floor, so far
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        real = at < vocab
        x = _load_logits(
            logits_ptr, prompt_ptr, counts_ptr, at, real, inverse_temperature, repetition, frequency, presence,
            HAS_PENALTIES,
        )  # fmt: skip
        if HAS_FILTERS:
            key = _ordered(x)
            equal = (real & (key == floor)).to(tl.int32)
            rank = num_equal + tl.cumsum(equal, 0)
            num_equal += tl.sum(equal, 0)
            x = tl.where((key > floor) | ((equal > 0) & (rank <= places)), x, float("-inf"))
        if not greedy:
            x = x + _gumbel(seed, position, start, TILE)
        tile_best = tl.max(x, 0)
        if tile_best > best:
            best = tile_best
            best_token = start + tl.argmax(x, 0, tie_break_left=True).to(tl.int32)
    return best_token


@triton.jit
def _sample(
    token_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    penalty_row_ptr, in_prompt_ptr, counts_ptr, repetition_ptr, frequency_ptr, presence_ptr, vocab,
    HAS_FILTERS: tl.constexpr, HAS_PENALTIES: tl.constexpr, TILE: tl.constexpr, SEARCH_TILE: tl.constexpr,
):  # fmt: skip
    """One token of one row of logits [num_rows, vocab] float32.

    [num_rows]: token int64, temperature (0 = greedy), top_k int64 (0 and -1 = off), top_p (1 = off), min_p (0 = off), seed and position
    int64, penalty_row int64: the row in in_prompt and counts [k, vocab], repetition, frequency and presence [k], or -1 for none.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < 1e-5
    inverse_temperature = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    repetition, frequency, presence = 1.0, 0.0, 0.0
    if HAS_PENALTIES:
        penalty_row = tl.load(penalty_row_ptr + row)
        has_some = penalty_row >= 0
        # A row without penalties reads the first one's counts, with factors that change nothing.
        penalty_row = tl.maximum(penalty_row, 0)
        repetition = tl.load(repetition_ptr + penalty_row, mask=has_some, other=1.0)
        frequency = tl.load(frequency_ptr + penalty_row, mask=has_some, other=0.0)
        presence = tl.load(presence_ptr + penalty_row, mask=has_some, other=0.0)
        in_prompt_ptr += penalty_row * vocab
        counts_ptr += penalty_row * vocab
    floor, places = tl.full([], 0, tl.uint32), tl.full([], 2147483647, tl.int32)
    if HAS_FILTERS and not greedy:
        floor, places = _keep(
            logits_ptr, in_prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
            row, top_k_ptr, top_p_ptr, min_p_ptr, HAS_PENALTIES, TILE, SEARCH_TILE,
        )  # fmt: skip
    token = _draw(
        logits_ptr, in_prompt_ptr, counts_ptr, inverse_temperature, repetition, frequency, presence, vocab,
        floor, places, greedy, tl.load(seed_ptr + row), tl.load(position_ptr + row), HAS_FILTERS, HAS_PENALTIES, TILE,
    )  # fmt: skip
    tl.store(token_ptr + row, token.to(tl.int64))


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
) -> Tensor:
    """Draw one token per row: logits [num_rows, vocab] float32 -> [num_rows] int64. The logits stay as they are.

    temperature  [num_rows] float32; 0 = greedy, the lowest index among equals
    seeds        [num_rows] int64; with positions [num_rows] int64 they decide the noise, whatever else is in the batch
    top_k, top_p, min_p  as in SamplingMetadata; None = off for all rows
    penalties    as in `apply_penalties`
    """
    num_rows, vocab = logits.shape
    logits = logits.contiguous()
    has_filters = not (top_k is None and top_p is None and min_p is None)
    if has_filters:  # one kernel for all combinations of them: a launch with a new one would wait for the compiler
        top_k = torch.zeros_like(seeds) if top_k is None else top_k
        top_p = torch.ones_like(temperature) if top_p is None else top_p
        min_p = torch.zeros_like(temperature) if min_p is None else min_p
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    penalty_row = in_prompt = counts = repetition = frequency = presence = None
    if penalties is not None:
        penalty_row = torch.full_like(tokens, -1)
        penalty_row[penalties.rows] = torch.arange(len(penalties.rows), device=logits.device)
        in_prompt, counts = penalties.in_prompt.to(torch.int8).contiguous(), penalties.output_counts.contiguous()
        factors = (penalties.repetition, penalties.frequency, penalties.presence)
        repetition, frequency, presence = (factor.contiguous() for factor in factors)
    if num_rows:
        _sample[(num_rows,)](
            tokens, logits, temperature, top_k, top_p, min_p, seeds, positions,
            penalty_row, in_prompt, counts, repetition, frequency, presence, vocab,
            HAS_FILTERS=has_filters, HAS_PENALTIES=penalties is not None, TILE=TILE, SEARCH_TILE=SEARCH_TILE, num_warps=8,
        )  # fmt: skip
    return tokens


def draw(logits: Tensor, metadata: SamplingMetadata, penalties: Penalties | None) -> Tensor:
    """Penalties, transforms and draws of all rows in one kernel: logits [num_rows, vocab] -> [num_rows] int64."""
    transforms = (metadata.top_k, metadata.top_p, metadata.min_p)
    return sample_triton(logits, metadata.temperature, *metadata.noise_keys, *transforms, penalties=penalties)
