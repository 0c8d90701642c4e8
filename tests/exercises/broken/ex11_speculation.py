"""Of speculation."""

from __future__ import annotations

from broken import broken

NGRAM, REJECT, TEXTBOOK = "ngram_proposer", "rejection_sampler", "reference"
_LAST = "    return int(found[-1]) + 1 if len(found) else None\n"
_MIN = "        if n >= shortest:\n            found = ends\n"
_FOUND = "    found = ends if shortest == 1 else ends[:0]\n"
_ENDS = "    ends = np.flatnonzero(tokens[:last] == tokens[last])  # where an occurrence of the last token ends\n"
_RESIZE = "        return np.resize(tokens[start : start + self.num_tokens], self.num_tokens).tolist()\n"

BROKEN = [
    broken("latest", "the first", (_LAST, _LAST.replace("found[-1]", "found[0]")), module=NGRAM),
    broken(
        "longest",
        "the shortest",
        ("        if n >= shortest:\n", "        if n >= shortest and not len(found):\n"),
        module=NGRAM,
    ),
    broken(
        "longest",
        "the latest of any length",
        (
            _LAST,
            "    if shortest > 1:\n        return int(found[-1]) + 1 if len(found) else None\n    latest = np.flatnonzero(tokens[:last] == tokens[last])\n    return int(latest[-1]) + 1 if len(latest) else None\n",
        ),
        module=NGRAM,
    ),
    broken("bounds", "also shorter ones", (_MIN, "        found = ends\n"), module=NGRAM),
    broken("bounds", "also one token", (_FOUND, "    found = ends\n"), module=NGRAM),
    broken(
        "longest",
        "one less than the longest",
        ("range(2, longest + 1)", "range(2, max(3, longest))"),
        ("        if n >= shortest:\n", "        if shortest <= n <= longest:\n"),
        module=NGRAM,
    ),
    broken(
        "overlap",
        "may not",
        (_MIN, "        if n >= shortest and (ends <= last - n).any():\n            found = ends[ends <= last - n]\n"),
        module=NGRAM,
    ),
    broken(
        "goes_on",
        "ends where the text ends",
        (_RESIZE, "        return tokens[start : start + self.num_tokens].tolist()\n"),
        module=NGRAM,
    ),
    broken(
        "goes_on",
        "repeats its last token",
        (
            _RESIZE,
            "        found = tokens[start : start + self.num_tokens].tolist()\n        return found + found[-1:] * (self.num_tokens - len(found))\n",
        ),
        module=NGRAM,
    ),
    broken(
        "plain",
        "numpy's ints",
        (
            _RESIZE,
            _RESIZE.replace(".tolist()", "").replace(
                "return np.resize(tokens[start : start + self.num_tokens], self.num_tokens)",
                "return list(np.resize(tokens[start : start + self.num_tokens], self.num_tokens))",
            ),
        ),
        module=NGRAM,
    ),
    broken("plain", "the text is sorted", (_ENDS, _ENDS + "    tokens[:1] = tokens[-1:]\n"), module=NGRAM),
    broken(
        "prefix",
        "all that are equal",
        ("equal.long().cumprod(dim=1).sum(dim=1)", "equal.long().sum(dim=1)"),
        module=REJECT,
    ),
    broken(
        "prefix",
        "one more",
        (
            "    return equal.long().cumprod(dim=1).sum(dim=1).tolist()",
            "    found = equal.long().cumprod(dim=1).sum(dim=1) + 1\n    return torch.minimum(found, counts - 1).tolist()",
        ),
        module=REJECT,
    ),
    broken(
        "places",
        "no bonus sample between requests",
        ("torch.tensor([len(draft) + 1 for draft in drafts]", "torch.tensor([len(draft) for draft in drafts]"),
        module=REJECT,
    ),
    broken(
        "places",
        "as long as the longest",
        (
            "first = counts.cumsum(0) - counts",
            "first = torch.arange(len(drafts), device=sampled.device) * (longest + 1)",
        ),
        module=REJECT,
    ),
    broken(
        "acceptance", "may be more than 1", ("[min(Fraction(1), p / q) if q else", "[p / q if q else"), module=TEXTBOOK
    ),
    broken(
        "acceptance",
        "the other way round",
        ("min(Fraction(1), p / q) if q else Fraction(1)", "min(Fraction(1), q / p) if p else Fraction(1)"),
        module=TEXTBOOK,
    ),
    broken(
        "unchanged",
        "the target itself",
        ("    return [each / total for each in excess] if total else list(target)\n", "    return list(target)\n"),
        module=TEXTBOOK,
    ),
    broken(
        "unchanged",
        "not divided by its sum",
        ("[each / total for each in excess] if total", "excess if total"),
        module=TEXTBOOK,
    ),
    broken(
        "no_excess",
        "zeros where there is no excess",
        ("if total else list(target)", "if total else excess"),
        module=TEXTBOOK,
    ),
]
