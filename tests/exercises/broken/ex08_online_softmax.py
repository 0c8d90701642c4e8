"""Of the online softmax."""

from __future__ import annotations

from broken import broken

_LARGEST = "    largest = scores.amax(dim=-1, keepdim=True) if scores.shape[-1] else nothing\n"
_WEIGHTS = "    weights = torch.exp(scores - _shift(largest))\n"
_MERGED = "    return SoftmaxPart(largest, total, one.mixed * one_factor + other.mixed * other_factor)\n"
_PART = "    return SoftmaxPart(largest, weights.sum(dim=-1, keepdim=True), weights @ values)\n"

BROKEN = [
    broken(
        "largest",
        "never below 0",
        (
            _PART,
            _PART.replace(
                "SoftmaxPart(largest,",
                "SoftmaxPart(largest.clamp(min=0.0).masked_fill(largest == -torch.inf, -torch.inf),",
            ),
        ),
    ),
    broken(
        "largest",
        "of the magnitudes",
        (
            _PART,
            _PART.replace("SoftmaxPart(largest,", "SoftmaxPart(largest.abs() if scores.isfinite().all() else largest,"),
        ),
    ),
    broken(
        "total",
        "the mean",
        (
            _PART,
            _PART.replace(
                "weights.sum(dim=-1, keepdim=True)", "weights.sum(dim=-1, keepdim=True) / max(1, scores.shape[-1])"
            ),
        ),
    ),
    broken("total", "not shifted", (_PART, _PART.replace("weights.sum(", "torch.exp(scores).sum("))),
    broken(
        "mixed",
        "divided already",
        (_PART, _PART.replace("weights @ values", "weights @ values / weights.sum(dim=-1, keepdim=True).clamp(min=1)")),
    ),
    broken(
        "unseen",
        "counts as 0",
        (
            _WEIGHTS,
            "    scores = scores.masked_fill((scores == -torch.inf) & (largest > -torch.inf), 0.0)\n" + _WEIGHTS,
        ),
    ),
    broken(
        "unseen",
        "weighs a little",
        (
            _WEIGHTS,
            _WEIGHTS + "    weights = weights.masked_fill((scores == -torch.inf) & (largest > -torch.inf), 1e-3)\n",
        ),
    ),
    broken("nothing", "NaN", (_WEIGHTS, "    weights = torch.exp(scores - largest)\n")),
    broken(
        "nothing",
        "a large negative number",
        (_PART, _PART.replace("SoftmaxPart(largest,", "SoftmaxPart(largest.clamp(min=-1e4),")),
    ),
    broken(
        "large",
        "not shifted",
        (_WEIGHTS, "    weights = torch.exp(scores)\n"),
        (_PART, "    found = weights / torch.exp(_shift(largest))\n" + _PART.replace("weights", "found")),
    ),
    broken(
        "merged",
        "added as they are",
        (_MERGED, "    return SoftmaxPart(largest, one.total + other.total, one.mixed + other.mixed)\n"),
    ),
    broken(
        "merged or neutral", "the smaller factor for both", (_MERGED, _MERGED.replace("other_factor)", "one_factor)"))
    ),
    broken(
        "merged",
        "the first part's largest stays",
        (
            "    largest = torch.maximum(one.largest, other.largest)\n",
            "    largest = torch.where(one.largest == -torch.inf, other.largest, one.largest)\n",
        ),
    ),
    broken(
        "neutral",
        "is off by its last bit",
        (
            _MERGED,
            "    mixed = one.mixed * one_factor + other.mixed * other_factor\n    return SoftmaxPart(largest, total, mixed * (1 + 2**-23))\n",
        ),
    ),
    broken(
        "unchanged", "weights in place of scores", (_WEIGHTS, "    weights = scores.sub_(_shift(largest)).exp_()\n")
    ),
    broken(
        "unchanged",
        "merged into the first",
        (
            _MERGED,
            "    one.mixed.mul_(one_factor).add_(other.mixed * other_factor)\n    return SoftmaxPart(largest, total, one.mixed)\n",
        ),
    ),
    broken("finished", "not divided", ("torch.where(part.total == 0, 0.0, part.mixed / part.total)", "part.mixed")),
    broken(
        "finished",
        "NaN for a row that saw nothing",
        ("torch.where(part.total == 0, 0.0, part.mixed / part.total)", "part.mixed / part.total"),
    ),
]
