"""Pipeline stages: which stage has which layers (vllm/distributed/utils.py, get_pp_indices; model_executor/models/utils.py, make_layers).

The first stage has the token and position embeddings too, the last one the final norm and the output matrix. With tied weights these are
the same tensor, so both stages have it. Imports no torch: stage_ends.py changes the models.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stage03_engine.errors import ConfigError
from stage03_engine.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import nn

    from stage03_engine.core.features.distributed.ranks import Ranks

PARTITION = "VLLM_PP_LAYER_PARTITION"
"""The variable that says how many layers each stage has: 5,7."""
FIRST_STAGE = ("wte", "wpe", "embed_tokens")  # of gpt2.py and llama.py
LAST_STAGE = ("ln_f", "norm", "lm_head")
TIED = ("wte", "embed_tokens")  # with tied weights the output matrix too

_LAYER = re.compile(r"((?:transformer\.|model\.)?(?:h|layers)\.)(\d+)(\..*)")


def layer_partition(num_layers: int, pp_size: int) -> list[int]:
    """How many layers each stage has. Layers that are left over go to the stages just before the last, which has the output matrix to
    compute: 14 layers in 4 stages are 3, 4, 4, 3. Raises ConfigError for a stage without layers, and for a wrong VLLM_PP_LAYER_PARTITION."""
    if asked := os.environ.get(PARTITION, "").strip():
        return _asked_partition(asked, num_layers, pp_size)
    if pp_size > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size = {pp_size} is more than the model's {num_layers} layers: each stage needs at least one"
        )
    each, left = divmod(num_layers, pp_size)
    return [each + (pp_size - 1 - left <= stage < pp_size - 1) for stage in range(pp_size)]


def _asked_partition(asked: str, num_layers: int, pp_size: int) -> list[int]:
    words = [word.strip() for word in asked.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"environment variable {PARTITION}: {asked!r} is not a list of numbers of layers such as 5,7")
    layers = [int(word) for word in words]
    if len(layers) != pp_size:
        raise ConfigError(
            f"environment variable {PARTITION}: {asked} is for {len(layers)} stages, but pipeline_parallel_size is {pp_size}"
        )
    if sum(layers) != num_layers:
        raise ConfigError(
            f"environment variable {PARTITION}: {asked} adds up to {sum(layers)} layers, but the model has {num_layers}"
        )
    return layers


def layer_range(shape: ModelShape, own: Ranks) -> range:
    """The layers of this worker's stage, by their numbers in the whole model, whose size is `shape`. Raises ConfigError."""
    if own.pp_size == 1:
        return range(shape.num_layers)
    layers = layer_partition(shape.num_layers, own.pp_size)
    first = sum(layers[: own.pp_rank])
    return range(first, first + layers[own.pp_rank])


def own_layers(shape: ModelShape, own: Ranks) -> ModelShape:
    """The size of this worker's stage: fewer layers, numbered from 0. Raises ConfigError."""
    mine = layer_range(shape, own)
    changes: dict[str, Any] = {"num_layers": len(mine)}
    if hasattr(shape, "sliding_layers"):
        changes["sliding_layers"] = tuple(layer - mine.start for layer in shape.sliding_layers if layer in mine)
    return replace(shape, **changes)


def local_name(name: str, shape: ModelShape, own: Ranks) -> str | None:
    """The name that a tensor of the checkpoint has in this worker's stage; None if the stage lacks it. `shape` is that of the whole
    model. A name that no model here has is passed to all stages, where loading refuses it."""
    if match := _LAYER.fullmatch(name):
        mine, layer = layer_range(shape, own), int(match[2])
        unknown = layer >= shape.num_layers and own.is_last_stage  # its number is too large there too
        return f"{match[1]}{layer - mine.start}{match[3]}" if layer in mine or unknown else None
    part = name.removeprefix("transformer.").removeprefix("model.").partition(".")[0]
    return name if has_part(part, shape, own) else None


def whole_name(name: str, shape: ModelShape, own: Ranks) -> str:
    """The other way round: the name in the whole model of what is called `name` in this worker's stage."""
    match = _LAYER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + layer_range(shape, own).start}{match[3]}" if match else name


def has_part(part: str, shape: ModelShape, own: Ranks) -> bool:
    """Does this worker's stage have this part of the model? (Not for layers.)"""
    if part in TIED and shape.tie_word_embeddings and own.is_last_stage:
        return True
    return own.is_first_stage if part in FIRST_STAGE else own.is_last_stage if part in LAST_STAGE else True


def leave_out(model: nn.Module, shape: ModelShape, own: Ranks) -> None:
    """Remove the tensors that this worker's stage lacks from a model without values, so that they are not loaded."""
    for part in (*FIRST_STAGE, *LAST_STAGE):
        module = getattr(model, part, None)
        if module is not None and not has_part(part, shape, own):
            for name in list(module._parameters):
                module.register_parameter(name, None)
