"""Log-probabilities in Triton, without a second copy of the logits (vLLM: v1/sample/ops/logprobs.py). One program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.sampler import SamplerKernels
from stage04_kernels.triton_kernels.sampler import SEARCH_TILE, TILE, _find_threshold, _ordered, draw


@triton.jit(do_not_specialize=["num_best"])  # one kernel for any number that a request asks for, 1 and 16 included
def _logprobs(
    logits_ptr,  # [num_rows, vocab] float32
    token_ptr,  # [num_rows] int64: the sampled tokens
    chosen_ptr,  # [num_rows] float32: their log-probabilities
    rank_ptr,  # [num_rows] int64
    best_ptr,  # [num_rows, num_best] float32: the most likely ones, by token
    best_token_ptr,  # [num_rows, num_best] int64
    vocab,
    num_best,
    HAS_BEST: tl.constexpr,  # num_best > 0
    TILE: tl.constexpr,
    SEARCH_TILE: tl.constexpr,
):
    """Log-probability and rank of the sampled token, and the `num_best` most likely ones in no particular order."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    chosen = tl.load(logits_ptr + tl.load(token_ptr + row))
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    num_larger = tl.full([], 0, tl.int32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
        num_larger += tl.sum((x > chosen).to(tl.int32), 0)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = new_largest
    log_total = largest + tl.log(total)
    tl.store(chosen_ptr + row, chosen - log_total)
    tl.store(rank_ptr + row, (num_larger + 1).to(tl.int64))
    if HAS_BEST:
        zero = tl.full([], 0, tl.uint32)
        target = num_best.to(tl.float32)
        floor, above = _find_threshold(
            logits_ptr, logits_ptr, logits_ptr, 1.0, 1.0, 0.0, 0.0, vocab,
            largest, zero, 1.0, target, False, False, SEARCH_TILE,
        )  # fmt: skip
        places = (target - above).to(tl.int32)
        num_equal = tl.full([], 0, tl.int32)
        num_kept = tl.full([], 0, tl.int32)
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            real = at < vocab
            x = tl.load(logits_ptr + at, mask=real, other=float("-inf"))
            key = _ordered(x)
            equal = (real & (key == floor)).to(tl.int32)
            rank = num_equal + tl.cumsum(equal, 0)
            num_equal += tl.sum(equal, 0)
            keep = (real & (key > floor)) | ((equal > 0) & (rank <= places))
            place = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
            num_kept += tl.sum(keep.to(tl.int32), 0)
            tl.store(best_ptr + row * num_best + place, x - log_total, mask=keep)
            tl.store(best_token_ptr + row * num_best + place, at.to(tl.int64), mask=keep)


def gather_logprobs_triton(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `gather_logprobs`, without a second [num_rows, vocab]: each row is read, and only what was asked for is written."""
    num_rows, vocab = logits.shape
    logits = logits.contiguous()
    count = min(num_logprobs, vocab)
    chosen = torch.empty(num_rows, 1, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    best = torch.full((num_rows, count), -torch.inf, device=logits.device)
    best_tokens = torch.zeros(num_rows, count, dtype=torch.int64, device=logits.device)
    if num_rows:
        _logprobs[(num_rows,)](
            logits, token_ids, chosen, ranks, best, best_tokens, vocab, count,
            HAS_BEST=count > 0, TILE=TILE, SEARCH_TILE=SEARCH_TILE, num_warps=8,
        )  # fmt: skip
    best, order = best.sort(dim=-1, descending=True, stable=True)
    ids = best_tokens.gather(1, order)
    return torch.cat([token_ids[:, None], ids], 1), torch.cat([chosen, best], 1), ranks


SAMPLER_KERNELS = SamplerKernels(draw, gather_logprobs_triton)
