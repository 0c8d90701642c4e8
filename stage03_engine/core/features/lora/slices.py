"""Which part of a pair a worker keeps (vllm/lora/layers: slice_lora_a, slice_lora_b).

A pair is cut like the layer that it stands beside. A layer whose outputs are spread over the workers has rows of B, and all of A; one whose inputs
are has columns of A, and all of B: its products are summed over the workers, and those of the pair with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from stage03_engine.core.models.layers import Linear
from stage03_engine.mixins import load
from stage03_engine.model_shape import ModelShape

if TYPE_CHECKING:
    from stage03_engine.core.features.distributed.ranks import Ranks
    from stage03_engine.core.features.distributed.sharded_weights import Split

_ROOM = "stage03_engine.core.features.distributed."
MOST_BYTES = 1000  # of an error


@dataclass(frozen=True)
class Sliced:
    """A linear layer of this worker, and how the model's layer is cut."""

    name: str
    layer: Linear
    shape: ModelShape
    own: Ranks | None = None  # None: there is one worker
    split: Split | None = None  # None: the layer is whole on every worker
    part: str = ""  # of the pair, that is cut: "A" or "B"

    def size(self, part: str, rank: int) -> tuple[int, int]:
        """Of A [rank, in_features] or B [out_features, rank] of the whole model."""
        length = self.layer.in_features if part == "A" else self.layer.out_features
        if self.split is not None and part == self.part:
            length = self.split.parts * load(_ROOM + "sharded_weights:length_of")(self.split.along, self._whole)
        return (rank, length) if part == "A" else (length, rank)

    def cut(self, part: str, tensor: Tensor) -> Tensor:
        """This worker's part of A or B."""
        if self.split is None or part != self.part:
            return tensor
        cut = load(_ROOM + "sharded_weights:cut")
        found: Tensor = cut(f"lora_{part} of {self.name}", tensor, self.split, self._whole, self.own)
        return found

    @property
    def _whole(self) -> ModelShape:
        whole: ModelShape | None = getattr(self.shape, "part_of", None)
        return self.shape if whole is None else whole


def linear_layers(model: nn.Module, shape: ModelShape) -> dict[str, Sliced]:
    """Name in a checkpoint of PEFT -> layer. Of several workers each has its slices, of the layers of its stage."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    whole = getattr(shape, "part_of", None)
    if whole is None:
        return {name: Sliced(name, layer, shape) for name, layer in found.items()}
    own, whole_name = load(_ROOM + "parallel_state:ranks")(), load(_ROOM + "stages:whole_name")
    wrapped = {name.replace(".inner", "").removeprefix("inner."): layer for name, layer in found.items()}
    return {(at := whole_name(name, whole, own)): _sliced(at, layer, shape, own) for name, layer in wrapped.items()}


def is_elsewhere(name: str, shape: ModelShape) -> bool:
    """Is this a layer of another stage? What no stage knows is none: where it would be, it is refused."""
    whole = getattr(shape, "part_of", None)
    if whole is None:
        return False
    return load(_ROOM + "stages:local_name")(name, whole, load(_ROOM + "parallel_state:ranks")()) is None


def _sliced(name: str, layer: Linear, shape: ModelShape, own: Ranks) -> Sliced:
    split = load(_ROOM + "sharded_weights:split_of")(f"{name}.weight")
    if split is None:
        return Sliced(name, layer, shape)
    outputs = (
        0 if type(layer).stored_size is Linear.stored_size else 1
    )  # the dimension of the stored weight that counts outputs
    part = "B" if split.dim == outputs else "A"
    cut = load(_ROOM + "sharded_weights:Split")(0 if part == "B" else 1, split.along, split.parts)
    return Sliced(name, layer, shape, own, cut, part)


def first_error(error: str | None, shape: ModelShape) -> str | None:
    """What went wrong in the first worker of a model in which anything did; None if nothing did in any. All of them ask at the same time."""
    if getattr(shape, "part_of", None) is None:
        return error
    import torch

    own = load(_ROOM + "parallel_state:ranks")()
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    said = (error or "").encode()[:MOST_BYTES]
    lines = torch.zeros(own.world_size, MOST_BYTES, dtype=torch.int32)  # each worker writes its own
    lines[own.rank, : len(said)] = torch.tensor(list(said), dtype=torch.int32)
    load(_ROOM + "parallel_state:all_reduce_everywhere")(lines := lines.to(device))
    errors = [bytes(line).rstrip(b"\0").decode(errors="ignore") for line in lines.tolist()]
    return next(filter(None, errors), None)
