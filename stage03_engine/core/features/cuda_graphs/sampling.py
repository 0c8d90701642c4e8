"""The sampler in the graph of a decode step: its settings lie at fixed addresses, as the step's other inputs do.

vLLM ends its graphs with the hidden states. Here logits and the draw follow in the same graph, because for a small model they are as many launches as a layer. The draw is the fused one: a greedy
row, and a row without top-k, differ by their numbers alone. Where something changes the logits in between (grammars, penalties, a class of the user's), the graph's tokens do not count: such a step samples again, from the graph's logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stage04_kernels.sampler import SamplerKernels, SamplerOutput, SamplingMetadata, report_named

Sampler = Callable[[Tensor, SamplingMetadata, str], SamplerOutput]


class FixedSettings:
    """Each setting, for every row of the largest batch; a graph of fewer rows reads the first of them."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        self._values: dict[str, tuple[Tensor, float]] = {
            "temperature": (column(0, torch.float32), 0), "top_k": (column(0, torch.int64), 0),
            "top_p": (column(1, torch.float32), 1), "min_p": (column(0, torch.float32), 0),
            "seed": (column(0, torch.int64), 0), "position": (column(0, torch.int64), 0),
        }  # fmt: skip
        self._all_greedy = True

    def of(self, rows: int) -> SamplingMetadata:
        """What the graph of so many rows reads. Every transform is on: a row's own value switches it off."""
        temperature, top_k, top_p, min_p, seed, position = (tensor[:rows] for tensor, _ in self._values.values())
        return SamplingMetadata(temperature, top_k, top_p, min_p, (seed, position), [])

    def fill(self, metadata: SamplingMetadata) -> None:
        """A step's settings. Rows after the last are greedy, which costs least."""
        if self._all_greedy and not metadata.random_rows:
            return
        seed, position = metadata.noise_keys
        own = (metadata.temperature, metadata.top_k, metadata.top_p, metadata.min_p, seed, position)
        count = len(metadata.temperature)
        for (fixed, off), value in zip(self._values.values(), own, strict=True):
            fixed[:count] = off if value is None else value
            fixed[count:] = off
        self._all_greedy = not metadata.random_rows


class GraphSampler:
    """What the graphs left of the step that runs: its logits and its tokens, for whoever asks with the same hidden states and settings.

    Invariant: tokens are handed out only if neither hidden states, logits nor settings were exchanged since the replay, which the identity of the tensors shows."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], sampler: Sampler, kernels: SamplerKernels) -> None:
        self._compute_logits, self._sampler, self._kernels = compute_logits, sampler, kernels
        self.forget()

    def forget(self) -> None:
        """The next step was not replayed."""
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None
        self._tokens: Tensor | None = None
        self._metadata: SamplingMetadata | None = None

    def remember(
        self, hidden: Tensor, logits: Tensor, tokens: Tensor, metadata: SamplingMetadata | None
    ) -> None:  # fmt: skip
        """A step was replayed; `metadata` None: its settings were not known, so the tokens do not count."""
        self._hidden, self._logits, self._tokens, self._metadata = hidden, logits, tokens, metadata

    def computed(self, hidden: Tensor, settings: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Logits and tokens of all rows: what a graph holds after the model."""
        logits = self._compute_logits(hidden)
        return logits, self._kernels.draw(logits, settings, None)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """In the place of the model's own."""
        replayed = self._logits is not None and hidden_states is self._hidden
        return self._logits if replayed and self._logits is not None else self._compute_logits(hidden_states)

    def settings(self, make: Callable[[], SamplingMetadata]) -> SamplingMetadata:
        """Those that the graph has read, else new ones."""
        return make() if self._metadata is None else self._metadata

    def sample(self, logits: Tensor, metadata: SamplingMetadata, backend: str = "torch") -> SamplerOutput:
        """In the place of `sample`."""
        if self._tokens is None or logits is not self._logits or not self._drew_with(metadata):
            return self._sampler(logits, metadata, backend)
        if metadata.max_num_logprobs is None:
            return SamplerOutput(self._tokens)
        likely, logprobs, ranks = self._kernels.gather_logprobs(logits, self._tokens, metadata.max_num_logprobs)
        if metadata.named:
            likely, logprobs = report_named(logits, likely, logprobs, metadata.named)
        return SamplerOutput(self._tokens, likely, logprobs, ranks)

    def _drew_with(self, metadata: SamplingMetadata) -> bool:
        """Did the graph draw with these settings, and does nothing else change the logits?"""
        own = self._metadata
        if own is None or metadata.rules is not None or metadata.before or metadata.after_temperature:
            return False
        ours, theirs = (
            (each.temperature, each.top_k, each.top_p, each.min_p, *each.noise_keys) for each in (own, metadata)
        )  # fmt: skip
        return all(one is other for one, other in zip(ours, theirs))
