"""Where adapters are: places in the device's memory, and a cache in the CPU's (vllm/lora/model_manager.py, LRUCacheLoRAModelManager).

    folder -> (read) -> CPU memory, --max-cpu-loras adapters -> (copied) -> places in the device's memory, --max-loras adapters

A linear layer has two tensors with the pairs of all places, so what is used is known at start and does not change, however many adapters come
and go. In both, the one that was used longest ago makes room. One that is used again and no longer in CPU memory is read from its folder again, and must
be what it was: its blocks in the KV cache are.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stage03_engine.core.features.lora.adapter import Adapter, Pair, read_adapter
from stage03_engine.core.features.lora.slices import Sliced, first_error
from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape
from stage04_kernels.features.lora import LowRankKernel, RowGroups
from stagetrace import trace


@dataclass
class Rows:
    """Which rows of the step's tokens use which place; all layers share it. None: no row uses any."""

    groups: RowGroups | None = None
    recorded: bool = False  # what runs now is recorded for rows of any place: no layer is left out


class LowRankSum:
    """What the adapters add to one layer: an addend of `Linear`."""

    def __init__(self, own: Sliced, rows: Rows, sizes: tuple[int, int], options: dict, kernel: LowRankKernel) -> None:
        """sizes: (places, highest rank); options: dtype and device."""
        self._rows, self._add = rows, kernel.add
        self.a, self.b = kernel.places(*sizes, (own.layer.in_features, own.layer.out_features), **options)
        self.filled: set[int] = set()  # places whose adapter changes this layer

    def put(self, place: int, pair: Pair | None) -> None:
        """The pair that stands in a place from now on; None: its adapter does not change this layer."""
        if place in self.filled:
            self.a[place].zero_()
            self.b[place].zero_()
            self.filled.remove(place)
        if pair is not None:
            rank = pair.a.shape[0]
            self.a[place, :rank].copy_(pair.a)
            self.b[place, :, :rank].copy_(pair.b)
            self.filled.add(place)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [num_tokens, in_features], y: [num_tokens, out_features]."""
        groups = self._rows.groups
        if groups is None or not (self._rows.recorded or self.filled.intersection(groups.places)):
            return y
        return self._add(y, x, self.a, self.b, groups)


def place_for(
    places: Mapping[int, int], num_places: int, in_batch: Collection[int], pinned: Collection[int]
) -> tuple[int, int | None]:
    """(the place that an adapter gets, the adapter that makes room or None): the lowest free place, else that of the adapter which was
    used longest ago, of those that the batch does not need; one that is pinned goes only if no other can.

    places: adapter -> its place, used longest ago first.
    """
    if len(places) < num_places:
        return min(set(range(num_places)) - set(places.values())), None
    evicted = min((each for each in places if each not in in_batch), key=lambda each: each in pinned)
    return places[evicted], evicted


class AdapterPlaces:
    """The adapters of one worker. They are named by their numbers (vLLM: lora_int_id).

    Invariant: `add`, `remove` and `ensure` are called with the same arguments in all workers of a model, and leave the same adapters in the same places.
    """

    def __init__(
        self,
        layers: Mapping[str, Sliced],
        sums: Mapping[str, LowRankSum],
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        shape: ModelShape,
    ) -> None:
        """sizes: (places, adapters in CPU memory, highest rank)."""
        self._layers, self._sums, self._dtype, self._shape = layers, sums, dtype, shape
        self._num_places, self._num_cached, self._max_rank = sizes
        self._sources: dict[int, tuple[str, str, str]] = {}  # name, folder, digest of its files
        self.cached: OrderedDict[int, Adapter] = OrderedDict()  # used longest ago first
        self.places: OrderedDict[int, int] = OrderedDict()  # adapter -> place, used longest ago first
        self.pinned: set[int] = set()

    def add(self, number: int, name: str, folder: str, digest: str) -> None:
        """Read an adapter into CPU memory. Raises ConfigError if any worker cannot, or its files have another digest."""
        adapter = self._read(number, name, folder, digest)
        self._sources[number] = (name, folder, digest)
        self._keep(number, adapter)

    def remove(self, number: int) -> None:
        """Forget an adapter; an unknown one is ignored. No request uses it."""
        source = self._sources.pop(number, None)
        self.cached.pop(number, None)
        self.pinned.discard(number)
        if (place := self.places.pop(number, None)) is not None:
            self._put(place, None)
        if trace.on and source is not None:
            trace.emit("lora.dropped", id=number, adapter=source[0])

    def ensure(self, used: Iterable[int], in_batch: Collection[int]) -> dict[int, str]:
        """Bring the adapters that a step uses into places, of which those of the batch keep theirs. Returns those that could not be read, and why."""
        failed: dict[int, str] = {}
        for number in used:
            try:
                self._ensure(number, in_batch)
            except ConfigError as error:
                failed[number] = str(error)
        return failed

    def _ensure(self, number: int, in_batch: Collection[int]) -> None:
        if number in self.places:
            self.places.move_to_end(number)
            if number in self.cached:
                self.cached.move_to_end(number)
            return
        if number not in self.cached:
            self._keep(number, self._read(number, *self._sources[number]))
        self.cached.move_to_end(number)
        place, evicted = place_for(self.places, self._num_places, in_batch, self.pinned)
        if evicted is not None:
            del self.places[evicted]
        self.places[number] = place
        self._put(place, self.cached[number])
        if trace.on:
            trace.emit("lora.placed", id=number, adapter=self._sources[number][0], place=place, evicted=evicted)

    def _put(self, place: int, adapter: Adapter | None) -> None:
        for name, layer in self._sums.items():
            layer.put(place, None if adapter is None else adapter.pairs.get(name))

    def _keep(self, number: int, adapter: Adapter) -> None:
        """In CPU memory, in place of the one that was used longest ago."""
        self.cached[number] = adapter
        while len(self.cached) > self._num_cached:
            del self.cached[next(each for each in self.cached if each not in self.pinned or each == number)]

    def _read(self, number: int, name: str, folder: str, digest: str) -> Adapter:
        """Raises ConfigError if any of the workers cannot; so all of them have it, or none."""
        started, adapter, error = time.monotonic(), None, None
        try:
            adapter = read_adapter(name, Path(folder), self._layers, self._max_rank, self._dtype, self._shape, digest)
        except ConfigError as caught:
            error = caught
        failed = first_error(None if error is None else str(error), self._shape)
        if failed is not None or adapter is None:
            raise ConfigError(failed) from error
        if trace.on:
            trace.emit(
                "lora.loaded", id=number, adapter=name, rank=adapter.rank, layers=len(adapter.pairs), bytes=adapter.num_bytes,
                seconds=round(time.monotonic() - started, 4),
            )  # fmt: skip
        return adapter
