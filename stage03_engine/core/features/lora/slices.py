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
    """Name in a checkpoint of PEFT -> layer. Of several workers each has its slices."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    if getattr(shape, "part_of", None) is None:
        return {name: Sliced(name, layer, shape) for name, layer in found.items()}
    own = load(_ROOM + "parallel_state:ranks")()
    wrapped = {name.replace(".inner", "").removeprefix("inner."): layer for name, layer in found.items()}
    return {name: _sliced(name, layer, shape, own) for name, layer in wrapped.items()}


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


def all_workers_say(failed: bool, shape: ModelShape) -> bool:
    """Has it failed in any of the workers of one model? All of them ask at the same time."""
    if getattr(shape, "part_of", None) is None:
        return failed
    import torch

    flag = torch.tensor([float(failed)])
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    found: Tensor = load(_ROOM + "parallel_state:all_reduce")(flag.to(device))
    return bool(found.item())
