"""Random rules for the logits of a batch, as tensors and as plain values. vLLM has no counterpart file."""

from __future__ import annotations

import random
from typing import Any

import torch

from stage04_kernels.features.logits_processors import LogitsRules, Pairs, Penalties
from stage04_kernels.lab import logits_reference


def random_rules(seed: int, num_rows: int, vocab: int) -> tuple[LogitsRules, list[dict[str, Any]]]:
    """Rules for random rows of a batch: as tensors, and as what each row's twins take."""
    rng = random.Random(seed)

    def some_tokens(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randrange(1, count))]

    plain: list[dict[str, Any]] = [
        {
            "allowed": set(some_tokens(vocab)) if rng.random() < 0.5 else None,
            "forbidden": set(some_tokens(vocab)) if rng.random() < 0.5 else set(),
            "bias": {token: rng.uniform(-5, 5) for token in some_tokens(8)} if rng.random() < 0.5 else {},
            "penalties": (
                some_tokens(20),
                some_tokens(20),
                rng.uniform(0.5, 2),
                rng.uniform(-2, 2),
                rng.uniform(-2, 2),
            ),
        }
        for _ in range(num_rows)
    ]

    def pairs(name: str) -> Pairs:
        both = [(row, token) for row, rules in enumerate(plain) for token in rules[name] or ()]
        return Pairs(*torch.tensor(both, dtype=torch.int64).reshape(-1, 2).unbind(1))

    prompts, outputs, *settings = zip(*(rules["penalties"] for rules in plain))
    counts = torch.stack([torch.tensor(output).bincount(minlength=vocab) for output in outputs])
    in_prompt = torch.stack([torch.tensor(prompt).bincount(minlength=vocab) > 0 for prompt in prompts])
    penalties = Penalties(torch.arange(num_rows), in_prompt, counts.float(), *map(torch.tensor, settings))
    bias = torch.tensor([x for rules in plain for x in rules["bias"].values()])
    return LogitsRules(pairs("allowed"), pairs("forbidden"), (pairs("bias"), bias), penalties), plain


def apply_rules_reference(logits: list[float], rules: dict[str, Any]) -> list[float]:
    """One row through the slow twins in the order of `apply_rules`."""
    logits = logits_reference.allowed(logits, rules["allowed"])
    logits = logits_reference.forbidden(logits, rules["forbidden"])
    logits = logits_reference.bias(logits, rules["bias"])
    return logits_reference.penalties(logits, *rules["penalties"])
