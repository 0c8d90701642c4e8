"""Mixed steps as pieces (vllm/compilation/piecewise_backend.py and cuda_graph.py; `splitting_ops` in vllm/config/compilation.py).

How attention is cut into launches depends on the requests of a step, so no graph can hold it. All else in a layer works row by row, and depends on the number of rows alone. So the model is cut at
attention: what lies before the first, between any two, and after the last is a graph each, recorded for some numbers of tokens; a step is padded to the next of them, and attention runs in between as ever, on the step's own metadata.

What crosses the cut lies at fixed addresses: a piece ends by copying queries, keys and values side by side to one place, attention's result is copied to another, from which the next piece reads. All layers and
all sizes share the two places, for no two of them are in use at once. vLLM cuts the compiler's graph; here the model itself is interrupted, while it runs for the recording. So it makes no difference whether torch.compile has been there before.

Invariant: attention, and with it the KV cache, only ever sees the rows of the step. Rows of padding pass through the pieces with what an earlier step left there, and nobody reads what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from stage03_engine.core.features.cuda_graphs.cuda_graphs import Graphs, Replay
from stage03_engine.core.models.layers import LanguageModel
from stage04_kernels.attention import AttentionBackend, AttentionMetadata


class _Crossing:
    """The two places: [most_tokens, num_heads + 2 * num_kv_heads, head_dim] for what attention reads, [most_tokens, num_heads, head_dim] for what it gives."""

    def __init__(self, most_tokens: int, query: Tensor, key: Tensor) -> None:
        self.heads, self.kv_heads, self.head_dim = query.shape[1], key.shape[1], query.shape[2]
        self.read = query.new_zeros(most_tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        self.given = query.new_zeros(most_tokens, self.heads, self.head_dim)

    def fits(self, query: Tensor, key: Tensor) -> bool:
        return (self.heads, self.kv_heads, self.head_dim) == (query.shape[1], key.shape[1], query.shape[2])


@dataclass
class _Attention:
    """One layer's attention, as the model called it when its neighbours were recorded."""

    own: AttentionBackend
    crossing: _Crossing
    kv_cache: Tensor
    scale: float
    window: int | None
    rotation: Any  # its tensors lie in the first piece

    def __call__(self, count: int, metadata: AttentionMetadata) -> None:
        """On the first `count` rows; the result goes where the next piece reads."""
        place = self.crossing
        query, key, value = place.read[:count].split((place.heads, place.kv_heads, place.kv_heads), dim=1)
        rotation = self.rotation
        if rotation is not None:
            rotation = type(rotation)(*(part[:count] for part in rotation))
        place.given[:count] = self.own(
            query, key, value, self.kv_cache, metadata, self.scale, self.window, rotation
        )  # fmt: skip


@dataclass
class _Step:
    """The pieces of a step of one size, and the attentions between them."""

    hidden: Tensor
    pieces: list[Replay] = field(default_factory=list)
    attentions: list[_Attention] = field(default_factory=list)


class PiecewiseGraphs:
    """The model's forward pass over any step of up to so many tokens."""

    def __init__(
        self, model: LanguageModel, kv_caches: list[Tensor], sizes: list[int], device: torch.device, graphs: Graphs
    ) -> None:  # fmt: skip
        self._model, self._kv_caches = model, kv_caches
        self.largest = max(sizes)
        self._input_ids = torch.zeros(self.largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._crossings: list[_Crossing] = []
        self._steps = {size: self.record(size, graphs) for size in sorted(sizes, reverse=True)}  # the largest first

    @property
    def num_pieces(self) -> int:
        """Of each size."""
        return len(next(iter(self._steps.values())).pieces)

    def replays(self, size: int) -> list[Replay]:
        """The pieces of a size."""
        return self._steps[size].pieces

    def record(self, size: int, graphs: Graphs) -> _Step:
        """All pieces of a step of so many tokens. Attention is left out meanwhile: its place holds zeros."""
        step, recording = _Step(self._positions), False

        def attend(
            own: AttentionBackend, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, *more: Any
        ) -> Tensor:
            place = self._crossing(query, key)
            torch.cat((query, key, value), dim=1, out=place.read[: len(query)])
            if recording:
                step.pieces.append(graphs.end())
                step.attentions.append(_Attention(own, place, kv_cache, *more))
                graphs.begin()
            return place.given[: len(query)]

        with _cut(self._model, attend), graphs.session():
            graphs.warm_up(lambda: self._run(size))
            graphs.begin()
            recording = True
            step.hidden = self._run(size)
            step.pieces.append(graphs.end())
        return step

    def _run(self, size: int) -> Tensor:
        none = cast(AttentionMetadata, None)  # only attention would read it
        hidden: Tensor = self._model(self._input_ids[:size], self._positions[:size], self._kv_caches, none)
        return hidden

    def _crossing(self, query: Tensor, key: Tensor) -> _Crossing:
        for place in self._crossings:
            if place.fits(query, key):
                return place
        self._crossings.append(_Crossing(self.largest, query, key))
        return self._crossings[-1]

    def size_of(self, count: int) -> int:
        """The size to which a step of so many tokens is padded."""
        return min(size for size in self._steps if size >= count)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """As the model's own. The result is overwritten by the next step."""
        count = len(input_ids)
        self._input_ids[:count] = input_ids
        self._positions[:count] = positions
        step = self._steps[self.size_of(count)]
        for piece, attend in zip(step.pieces, step.attentions):
            piece()
            attend(count, metadata)
        step.pieces[-1]()
        return step.hidden[:count]


@contextmanager
def _cut(model: LanguageModel, attend: Callable[..., Tensor]) -> Iterator[None]:
    """While this lasts, `attend(own, query, ...)` is called in the place of each layer's attention. Where torch.compile has put an operation there, what
    this operation calls is replaced (`within`)."""
    places: list[tuple[Any, str, Any]] = []
    for layer in model.modules():
        own = getattr(layer, "attention", None)
        if callable(own):
            places.append((own, "within", own.within) if hasattr(own, "within") else (layer, "attention", own))
    try:
        for owner, name, own in places:
            setattr(owner, name, _Call(attend, own))
        yield
    finally:
        for owner, name, own in places:
            setattr(owner, name, own)


class _Call:
    """Calls `attend` with the attention that it stands for."""

    def __init__(self, attend: Callable[..., Tensor], own: AttentionBackend) -> None:
        self._attend, self._own = attend, own

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any, scale: float, window: int | None = None, rotation: Any = None
    ) -> Tensor:  # fmt: skip
        return self._attend(self._own, query, key, value, kv_cache, scale, window, rotation)
