"""The slow twins of features/logits_processors.py: one row at a time, as lists. vLLM has no counterpart file."""

from __future__ import annotations

from stage04_kernels.lab.sampler_reference import NEVER


def allowed(logits: list[float], tokens: set[int] | None) -> list[float]:
    """Twin of `apply_allowed`; None: the row has no such rule."""
    return [x if tokens is None or index in tokens else NEVER for index, x in enumerate(logits)]


def forbidden(logits: list[float], tokens: set[int]) -> list[float]:
    """Twin of `apply_forbidden`."""
    left = [NEVER if index in tokens else x for index, x in enumerate(logits)]
    return left if any(x != NEVER for x in left) else list(logits)


def bias(logits: list[float], by_token: dict[int, float]) -> list[float]:
    """Twin of `apply_bias`."""
    return [x + by_token.get(index, 0.0) for index, x in enumerate(logits)]


def penalties(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> list[float]:
    """Twin of `apply_penalties`, from the tokens themselves."""
    result = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / repetition if x > 0 else x * repetition
        if token in output:
            x = x - frequency * output.count(token) - presence
        result.append(x)
    return result


def bad_words(words: list[list[int]], output: list[int]) -> set[int]:
    """Twin of `forbidden_by_bad_words`: by trying every token."""
    candidates = {word[-1] for word in words}
    return {token for token in candidates if any([*output, token][-len(word) :] == word for word in words)}
