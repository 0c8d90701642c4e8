"""The least time that a workload can take on a machine, from its bytes and its operations, as on a roofline.

A step reads each weight once, and the keys and values that its requests see; it computes its matrix products. A workload takes
at least the bytes of all its steps at the memory's measured rate, and at least their operations at the measured rate of matrix
products: the larger of the two, as reading and computing can overlap. Nothing else is counted (no biases, norms, scales, no
writing, no HTTP), so a limit is never too slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from race.workloads import Load, Scale

Rates = dict[str, float]
"""As rates.py measures them."""
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
OUTPUT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 1.0}  # of the output matrix: int8 beside int4
CACHE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 2.0, "int4": 2.0}  # of a key's or a value's number


@dataclass(frozen=True)
class Step:
    """What one step computes."""

    tokens: int
    sampled: int  # requests whose next token it finds
    keys: int  # positions whose keys and values are read, each one once
    pairs: int  # of a token and a position that it sees


@dataclass(frozen=True)
class Machine:
    """Its rates for one precision."""

    scale: Scale
    precision: str
    rates: Rates

    @property
    def memory(self) -> float:
        """Bytes per second: reading alone may be faster than copying."""
        return max(self.rates["copy"], self.rates["read"])

    @property
    def matrix(self) -> float:
        """Operations per second. Small types can be widened first, so that none is slower than a wider one; products of
        whole numbers and of bfloat16 do not help where float32 is asked for."""
        names = {"float32": ("float32",), "bfloat16": ("float32", "bfloat16")}
        return max(self.rates.get(name, 0.0) for name in names.get(self.precision, ("float32", "bfloat16", "int8")))

    def seconds(self, *steps: Step) -> float:
        """The least that the steps can take together."""
        scale, width = self.scale, self.scale.hidden_size
        weights, output = 12 * scale.layers * width**2, scale.vocab_size * width
        read = products = 0.0
        for step in steps:
            read += weights * WEIGHT_BYTES[self.precision] + (
                output * OUTPUT_BYTES[self.precision] if step.sampled else 0
            )
            read += 2 * scale.layers * width * step.keys * CACHE_BYTES[self.precision]
            products += 2 * weights * step.tokens + 2 * output * step.sampled + 4 * scale.layers * width * step.pairs
        return max(read / self.memory, products / self.matrix)


def prompt_step(requests: int, prompt: int, shared: int = 0) -> Step:
    """The prompts of `requests` in one step; what they share is computed once."""
    own = prompt * (prompt + 1) // 2 + prompt * shared
    begin = Step(shared, 0, shared, shared * (shared + 1) // 2)
    tokens = begin.tokens + requests * prompt
    return Step(tokens, requests, begin.keys + requests * prompt, begin.pairs + requests * own)


def decode_steps(requests: int, load: Load) -> Iterator[Step]:
    """All but the first token of each; keys that are shared are read once."""
    for done in range(1, load.output):
        own = load.prompt + done
        yield Step(requests, requests, load.shared + requests * own, requests * (load.shared + own))


def limits_of(scale: Scale, precision: str, rates: Rates) -> dict[tuple[str, str], float]:
    """(workload, measure) -> the best figure that the machine admits."""
    machine = Machine(scale, precision, rates)
    found: dict[tuple[str, str], float] = {}
    for name, load in scale.loads.items():
        at_once = min(load.requests, load.clients or scale.slots)
        waves = load.requests / at_once
        first, decodes = prompt_step(at_once, load.prompt, load.shared), [*decode_steps(at_once, load)]
        if load.output == 1:
            found[name, "ttft_ms"] = 1000 * machine.seconds(first)
        elif load.requests == 1:
            found[name, "tokens_per_s"] = len(decodes) / machine.seconds(*decodes)
        else:
            found[name, "tokens_per_s"] = load.requests * load.output / (waves * machine.seconds(first, *decodes))
        if load.clients:  # they ask together: each prompt waits for those before it, or all are computed in one step
            alone = machine.seconds(prompt_step(1, load.prompt, load.shared))
            found[name, "ttft_ms"] = 1000 * min(alone * (at_once + 1) / 2, machine.seconds(first))
            found[name, "tpot_ms"] = 1000 * machine.seconds(*decodes) / len(decodes)
    return found
