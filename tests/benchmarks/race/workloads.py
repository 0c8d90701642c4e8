"""The five workloads: what is asked of every engine, and what is measured. Standard library only, as each engine's Python
imports this."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

Generate = Callable[[list[list[int]], int, int], list[list[int]]]
"""(prompts as token ids, tokens to generate for each, tokens that all prompts begin with) -> the tokens of each answer."""


@dataclass(frozen=True)
class Load:
    """One workload. Lengths are in tokens."""

    title: str
    requests: int
    prompt: int  # of each request, and of no other
    output: int
    shared: int = 0  # that all prompts begin with
    clients: int = 0  # over HTTP; 0: no server


@dataclass(frozen=True)
class Scale:
    """One form of the race: GPT-2's shape, the sizes of the workloads, and what each engine may hold."""

    vocab_size: int
    positions: int
    hidden_size: int
    layers: int
    heads: int
    slots: int  # requests in one step
    kv_cache_bytes: int
    loads: dict[str, Load]


FULL = Scale(
    vocab_size=50257, positions=1024, hidden_size=768, layers=12, heads=12, slots=32, kv_cache_bytes=2 << 30,
    loads={
        "W1": Load("one stream, 32 → 128", requests=1, prompt=32, output=128),
        "W2": Load("64 × (128 → 128), 32 at once", requests=64, prompt=128, output=128),
        "W3": Load("a prompt of 1,000", requests=1, prompt=1000, output=1),
        "W4": Load("16 HTTP clients, 64 × (64 → 64)", requests=64, prompt=64, output=64, clients=16),
        "W5": Load("32 × (512 shared + 32 → 32)", requests=32, prompt=32, output=32, shared=512),
    },
)  # fmt: skip
QUICK = Scale(
    vocab_size=512, positions=128, hidden_size=128, layers=2, heads=2, slots=4, kv_cache_bytes=64 << 20,
    loads={
        "W1": Load("one stream, 8 → 16", requests=1, prompt=8, output=16),
        "W2": Load("6 × (8 → 8), 4 at once", requests=6, prompt=8, output=8),
        "W3": Load("a prompt of 100", requests=1, prompt=100, output=1),
        "W4": Load("3 HTTP clients, 6 × (8 → 8)", requests=6, prompt=8, output=8, clients=3),
        "W5": Load("4 × (32 shared + 8 → 8)", requests=4, prompt=8, output=8, shared=32),
    },
)  # fmt: skip


def prompts_of(name: str, load: Load, seed: int, vocab_size: int) -> list[list[int]]:
    """The same for every engine; another seed gives prompts that no cache knows. The last token id ends a text, and is left
    out."""
    rng = random.Random(f"{name} {seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size - 1) for _ in range(count)]

    shared = tokens(load.shared)
    return [shared + tokens(load.prompt) for _ in range(load.requests)]


def measure(name: str, scale: Scale, generate: Generate, seed: int) -> dict[str, float]:
    """Run a workload without HTTP once. Of one stream: decode tokens/s, without the time to the first token; of one output
    token: milliseconds to it; of several requests: output tokens/s of all. Raises ValueError for an answer that is too
    short."""
    load = scale.loads[name]
    prompts = prompts_of(name, load, seed, scale.vocab_size)

    def seconds(prompts: list[list[int]], output: int) -> float:
        began = time.perf_counter()
        answers = generate(prompts, output, load.shared)
        passed = time.perf_counter() - began
        if [len(answer) for answer in answers] != [output] * len(prompts):
            raise ValueError(f"{name}: not {len(prompts)} answers of {output} tokens")
        return passed

    if load.output == 1:
        return {"ttft_ms": 1000 * seconds(prompts, 1)}
    if load.requests == 1:
        first = min(seconds(prompts_of(f"{name} {run}", load, seed, scale.vocab_size), 1) for run in range(3))
        whole = seconds(prompts, load.output)
        decode = whole - first if whole > first else whole  # a disturbed first token must not look like speed
        return {"tokens_per_s": (load.output - 1) / decode}
    return {"tokens_per_s": load.requests * load.output / seconds(prompts, load.output)}
