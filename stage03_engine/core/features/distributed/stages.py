"""Which layers a worker has. There is one pipeline stage, so all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import nn

    from stage03_engine.core.features.distributed.parallel_state import Ranks
    from stage03_engine.core.model_runner import ModelRunner


def own_layers(shape: ModelShape, own: Ranks) -> ModelShape:
    """The shape with the layers of a worker's stage."""
    return shape


def local_name(name: str, shape: ModelShape, own: Ranks) -> str | None:
    """A checkpoint's name -> the name in a worker's stage; None if the tensor belongs to another one."""
    return name


def leave_out(model: nn.Module, shape: ModelShape, own: Ranks) -> None:
    """Take from a model without values what a worker's stage lacks."""


def install_ends(model: nn.Module, runner: ModelRunner) -> None:
    """Join a stage to the ones before and after it."""
