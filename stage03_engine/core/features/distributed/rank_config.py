"""The settings of one worker of several: those of the engine, with a model of the worker's own size.

A worker has `1 / tensor_parallel_size` of each layer's heads and of its MLP, in the layers of its pipeline stage. Model files, KV cache and
memory read sizes from the shape alone, so they need not know that there are others. hidden_size stays: what runs between the layers is
whole on every worker. So does vocab_size: a worker holds a part of the vocabulary's rows (parallel_layers.py), and has the logits of all.

In vLLM each layer divides for itself (model_executor/layers/linear.py, `divide`). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.stages import layer_range, own_layers
from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape


@dataclass(frozen=True)
class RankShape(ModelShape):
    """The size of one worker's part of a model. `part_of` is the size of all parts together, as in config.json; the first of the worker's
    own layers is the model's layer `first_layer`."""

    part_of: ModelShape | None = None
    first_layer: int = 0

    @property
    def whole(self) -> ModelShape:
        """The size of all parts together."""
        return self.part_of or self


def check_divides(shape: ModelShape, tp_size: int) -> None:
    """Raises ConfigError if this model cannot be cut into `tp_size` equal slices."""
    if why := _does_not_divide(shape, tp_size):
        possible = ", ".join(str(size) for size in range(1, shape.num_heads + 1) if not _does_not_divide(shape, size))
        raise ConfigError(f"tensor_parallel_size = {tp_size} {why}; possible for this model: {possible}")


def _does_not_divide(shape: ModelShape, tp_size: int) -> str:
    """What stands against `tp_size` equal slices; empty if nothing does."""
    if shape.num_heads % tp_size:
        return f"does not divide the model's {shape.num_heads} attention heads"
    if shape.num_kv_heads % tp_size and tp_size % shape.num_kv_heads:
        return f"neither divides the model's {shape.num_kv_heads} KV heads nor is a multiple of them"
    if shape.intermediate_size % tp_size:
        return f"does not divide the model's intermediate size, {shape.intermediate_size}"
    return ""


def rank_config(config: VllmConfig, own: Ranks) -> VllmConfig:
    """The settings of the worker at `own`, from those of the engine. Raises ConfigError for sizes that do not divide."""
    check_divides(config.shape, own.tp_size)
    return replace(config, model_config=replace(config.model_config, shape=rank_shape(config.shape, own)))


def rank_shape(whole: ModelShape, own: Ranks) -> RankShape:
    """The part of a model that the worker at `own` has. Raises ConfigError for layers that cannot be split."""
    shape = own_slice(own_layers(whole, own), whole, own.tp_size)
    return replace(shape, first_layer=layer_range(whole, own).start)


def own_slice(shape: ModelShape, whole: ModelShape, tp_size: int) -> RankShape:
    """`shape` with a worker's share of each layer. With fewer KV heads than workers, each of these heads is on several workers."""
    divided = {
        "num_heads": shape.num_heads // tp_size,
        "num_kv_heads": max(1, shape.num_kv_heads // tp_size),
        "intermediate_size": shape.intermediate_size // tp_size,
    }
    same = {field.name: getattr(shape, field.name) for field in fields(ModelShape)}
    return RankShape(**same | divided | {"part_of": whole})
