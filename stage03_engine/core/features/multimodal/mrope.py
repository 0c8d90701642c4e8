"""M-RoPE: positions of three components (Wang et al. 2024; vllm/model_executor/layers/rotary_embedding/mrope.py, and the `mrope_positions` of
vllm/v1/worker/gpu_model_runner.py).

A square of a picture has a time, a row and a column, and some pairs of a head turn with each. In a text all three are the same number, so
there M-RoPE is RoPE; only the numbers after a picture are smaller than its places would make them: they go on after its longer side. So
positions stay [num_tokens] in every step that computes no place of a picture, which can be replayed as ever, and are [num_tokens, 3] in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.llama.llama import LlamaForCausalLM
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage03_engine.messages import payload
from stage03_engine.model_shape import ModelShape
from stage03_engine.params.multimodal import MultiModalFeature, MultiModalInputs
from stage04_kernels.features.rope import Rotation, rope_cos_sin
from stage04_kernels.sampler import to_device
from stagetrace import trace

COMPONENTS = 3  # time, row, column


class MRopeForCausalLM(LlamaForCausalLM):
    """A Llama whose pairs turn with one component each."""

    component: Tensor  # [head_dim / 2] int64

    def __init__(self, shape: ModelShape, backend: str = "torch") -> None:
        super().__init__(shape, backend)
        pairs = torch.tensor(shape.mrope_section, device="cpu")
        self.register_buffer("component", torch.arange(COMPONENTS, device="cpu").repeat_interleave(pairs), False)

    def rotation(self, positions: Tensor) -> Rotation:
        """Of positions [num_tokens], which are those of a text, or [num_tokens, 3]."""
        return rope_cos_sin(positions if positions.dim() == 1 else positions[:, self.component], self.frequencies)


class Positions(NamedTuple):
    """Those of a request."""

    first: np.ndarray  # [num_places, 3] int64: up to the end of its last picture
    delta: int  # to be added to the number of any later place (vLLM: mrope_position_delta)

    def between(self, begin: int, end: int) -> np.ndarray:
        """Of the places from `begin` up to `end`: [end - begin, 3], or [end - begin] if all have one number."""
        later = np.arange(max(begin, len(self.first)), end) + self.delta
        found = np.concatenate([self.first[begin:end], with_components(later)])
        return found[:, 0] if (found == found[:, :1]).all() else found


def with_components(positions: np.ndarray) -> np.ndarray:
    """[count] -> [count, 3], the same number in each component."""
    return positions if positions.ndim == 2 else np.repeat(positions[:, None], COMPONENTS, axis=1)


def grid_positions(pictures: Sequence[MultiModalFeature], unit: int) -> Positions:
    """Of pictures whose places are a grid, row by row, of squares of `unit` pixels (vLLM: get_mrope_input_positions of Qwen2-VL)."""
    pieces, place, number = [np.empty((0, COMPONENTS), np.int64)], 0, 0
    for picture in pictures:
        text = np.arange(number, number + picture.offset - place)
        number += len(text)
        grid = np.indices((1, picture.height // unit, picture.width // unit)).reshape(COMPONENTS, -1).T
        pieces += [with_components(text), number + grid]
        number += max(picture.height, picture.width) // unit
        place = picture.offset + picture.length
    return Positions(np.concatenate(pieces), number - place)


class MRopeHook(RunnerHook):
    """Installed for a model with M-RoPE, which says what the positions of pictures are."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._positions: dict[str, Positions] = {}  # of requests with pictures

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model."""
        seeing: Any = model
        self._positions_of = seeing.positions_of
        return model

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Forget who left the batch."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._positions.pop(request_id, None)
        return scheduler_output

    def request_added(self, new: NewRequestData) -> None:
        """Where its pictures are decides all its positions."""
        if new.task is None:
            return
        found = self._positions_of(payload(new.task, MultiModalInputs).features)
        self._positions[new.request_id] = found
        if trace.on:
            trace.emit("mrope.positions", req=new.request_id, places=len(found.first), delta=found.delta)

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Positions that are not the numbers of places; blocks and masks still go by places. A recorded step has one number for each token;
        a step with places of pictures is never replayed, since some of its rows belong to no token (rows.py)."""
        scheduled = scheduler_output.num_scheduled_tokens
        if self._positions.keys().isdisjoint(scheduled):
            return
        batch, pieces = self.runner.batch, []
        for request_id, count in scheduled.items():
            end = int(batch.num_computed[batch.row_of[request_id]])
            of = self._positions.get(request_id, _TEXT)
            pieces.append(of.between(end - count, end))
        if any(piece.ndim == 2 for piece in pieces):
            pieces = [with_components(piece) for piece in pieces]
        inputs.positions = to_device([np.concatenate(pieces)], inputs.positions.device)[0]


_TEXT = Positions(np.empty((0, COMPONENTS), np.int64), 0)
