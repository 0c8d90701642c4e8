"""Of the sampler."""

from __future__ import annotations

from broken import broken

SAMPLER, RULES = "stage04_kernels.sampler", "logits_processors"
_RULES = """    if rules is not None:
        logits = rules.apply(logits, penalties=penalties is None)
"""
_BEFORE = """    for transform in metadata.before:
        logits = transform(logits, list(range(len(logits))))
"""
_AFTER = """    for transform in metadata.after_temperature:
        logits = transform(logits, metadata.random_rows)
"""
_RANDOM = "            token_ids[rows] = sample_random(transform_rows(logits[rows], rows, metadata), *keys)\n"
_DRAW = "    return (probs / noise).argmax(dim=-1)\n"

BROKEN = [
    broken(
        "kept",
        "top-p writes into what it was given",
        ("    result = logits.clone()\n    result[rows] =", "    result = logits\n    result[rows] ="),
        module=SAMPLER,
    ),
    broken(
        "kept",
        "the penalties write into what they were given",
        (
            "    result = logits.clone()\n    result[penalties.rows] =",
            "    result = logits\n    result[penalties.rows] =",
        ),
        module=RULES,
    ),
    broken(
        "repetition_sign",
        "divides always",
        ("torch.where(some > 0, some / repetition, some * repetition)", "some / repetition"),
        module=RULES,
    ),
    broken(
        "repetition_seen",
        "the prompt does not count",
        ("penalties.in_prompt | (counts > 0)", "counts > 0"),
        module=RULES,
    ),
    broken(
        "repetition_seen",
        "once for each time",
        (
            "some / repetition, some * repetition)",
            "some / repetition ** counts.clamp(min=1), some * repetition ** counts.clamp(min=1))",
        ),
        module=RULES,
    ),
    broken(
        "frequency",
        "once",
        ("penalties.frequency[:, None] * counts", "penalties.frequency[:, None] * (counts > 0)"),
        module=RULES,
    ),
    broken(
        "frequency",
        "the prompt counts",
        ("penalties.frequency[:, None] * counts", "penalties.frequency[:, None] * (counts + penalties.in_prompt)"),
        module=RULES,
    ),
    broken(
        "presence",
        "the prompt counts",
        ("penalties.presence[:, None] * (counts > 0)", "penalties.presence[:, None] * seen"),
        module=RULES,
    ),
    broken(
        "presence",
        "as often as it stands there",
        ("penalties.presence[:, None] * (counts > 0)", "penalties.presence[:, None] * counts"),
        module=RULES,
    ),
    broken(
        "alone",
        "penalties in the first rows",
        ("    result[penalties.rows] = some", "    result[: len(some)] = some"),
        module=RULES,
    ),
    broken(
        "min_p",
        "min_p is an absolute probability",
        ("min_p[:, None] * probs.amax(dim=-1, keepdim=True)", "min_p[:, None] * torch.ones_like(probs)"),
        module=SAMPLER,
    ),
    broken(
        "top_k",
        "one token too many",
        ("(equal.cumsum(dim=-1) <= places_left)", "(equal.cumsum(dim=-1) <= places_left + 1)"),
        module=SAMPLER,
    ),
    broken(
        "top_k",
        "0 keeps one",
        ("on = (top_k > 0)[:, None]", "on = (top_k >= 0)[:, None]"),
        ("1).clamp(max=", "1).clamp(min=1, max="),
        module=SAMPLER,
    ),
    broken(
        "top_p",
        "the token that reaches top_p is left out",
        ("mass_before >= top_p[rows, None]", "mass_before + probs > top_p[rows, None]"),
        module=SAMPLER,
    ),
    broken(
        "top_p_ties",
        "equals in any order",
        ("logits[rows].sort(dim=-1, descending=True, stable=True)", "_last_first(logits[rows])"),
        (
            "def apply_top_p(",
            "def _last_first(logits):\n    found = logits.flip(-1).sort(dim=-1, descending=True, stable=True)\n    return found.values, logits.shape[-1] - 1 - found.indices\n\n\ndef apply_top_p(",
        ),
        module=SAMPLER,
    ),
    broken(
        "order",
        "top-p before top-k",
        (
            "    if metadata.top_k is not None:\n        logits = apply_top_k(logits, metadata.top_k[rows])\n    if metadata.top_p is not None:\n        logits = apply_top_p(logits, metadata.top_p[rows])\n",
            "    if metadata.top_p is not None:\n        logits = apply_top_p(logits, metadata.top_p[rows])\n    if metadata.top_k is not None:\n        logits = apply_top_k(logits, metadata.top_k[rows])\n",
        ),
        module=SAMPLER,
    ),
    broken(
        "order",
        "temperature after min-p",
        ("    logits = apply_temperature(logits, metadata.temperature[rows])\n", ""),
        (
            "    if metadata.top_k is not None:\n        logits = apply_top_k",
            "    logits = apply_temperature(logits, metadata.temperature[rows])\n    if metadata.top_k is not None:\n        logits = apply_top_k",
        ),
        module=SAMPLER,
    ),
    broken(
        "order",
        "settings of the wrong rows",
        ("metadata.temperature[rows]", "metadata.temperature[: len(rows)]"),
        module=SAMPLER,
    ),
    broken("race", "the last to arrive", (_DRAW, "    return (noise / probs).argmax(dim=-1)\n"), module=SAMPLER),
    broken("race", "noise multiplied", (_DRAW, "    return (probs * noise).argmax(dim=-1)\n"), module=SAMPLER),
    broken(
        "alone",
        "the noise of the first row for all",
        (
            "exponential_noise(seeds, positions,",
            "exponential_noise(seeds[:1] * len(seeds), positions[:1] * len(seeds),",
        ),
        module=SAMPLER,
    ),
    broken(
        "alone",
        "probabilities of the whole batch",
        (_DRAW, "    return (probs / probs.sum() / noise / noise.amin(0)).argmax(dim=-1)\n"),
        module=SAMPLER,
    ),
    broken(
        "greedy",
        "the rules for random rows alone",
        (
            _RULES,
            "    if rules is not None:\n        changed = rules.apply(logits, penalties=penalties is None)\n        logits = logits.clone()\n        logits[metadata.random_rows] = changed[metadata.random_rows]\n",
        ),
        module=SAMPLER,
    ),
    broken(
        "greedy",
        "the highest index among equals",
        (
            "        token_ids = logits.argmax(dim=-1)\n",
            "        token_ids = logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)\n",
        ),
        module=SAMPLER,
    ),
    broken(
        "own",
        "before is skipped when all rows are greedy",
        (
            _BEFORE,
            "    for transform in metadata.before if metadata.random_rows else []:\n        logits = transform(logits, list(range(len(logits))))\n",
        ),
        module=SAMPLER,
    ),
    broken("own", "before the rules", (_RULES + _BEFORE, _BEFORE + _RULES), module=SAMPLER),
    broken(
        "own",
        "before the temperature",
        (_AFTER, ""),
        ("    logits = apply_temperature(", _AFTER + "    logits = apply_temperature("),
        module=SAMPLER,
    ),
    broken("own", "after_temperature is left out", (_AFTER, ""), module=SAMPLER),
    broken(
        "logprobs", "of the changed logits", ("gather(raw, token_ids,", "gather(logits, token_ids,"), module=SAMPLER
    ),
    broken("logprobs", "named tokens are forgotten", ("    if metadata.named:\n", "    if False:\n"), module=SAMPLER),
    broken(
        "logprobs",
        "none is as many as nobody asked",
        ("    if metadata.max_num_logprobs is None:\n", "    if not metadata.max_num_logprobs:\n"),
        module=SAMPLER,
    ),
]
