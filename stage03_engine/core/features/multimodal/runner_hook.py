"""Pictures in the model runner: the encoder, its outputs, and whose rows they take (GPUModelRunner, `_execute_mm_encoder` and
`_gather_mm_embeddings`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.embedding_rows.rows import EmbeddingRows
from stage03_engine.core.features.multimodal.messages import WORK
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.kv_cache_size import item_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage03_engine.messages import payload
from stage03_engine.params.multimodal import MultiModalFeature, MultiModalInputs
from stagetrace import trace


class EncoderRunnerHook(RunnerHook):
    """Installed for a model that sees."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._features: dict[str, list[MultiModalFeature]] = {}  # request -> its pictures
        self._cache: dict[str, Tensor] = {}  # name -> [num_tokens, hidden_size]
        self._rows = EmbeddingRows.of(runner)

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model, whose encoder is called from here."""
        seeing: Any = model
        self._encode = seeing.encode
        return model

    def reserved_bytes(self) -> int:
        """Of the encoder's outputs."""
        return self.config.encoder_budget * self.config.shape.hidden_size * item_bytes(self.config)

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """The scheduler's copy of a prompt holds numbers made of pixels; the batch gets the token that stands for pictures."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._features.pop(request_id, None)
        if not any(new.task is not None for new in scheduler_output.scheduled_new_reqs):
            return scheduler_output
        new_requests = [self._with_tokens(new) for new in scheduler_output.scheduled_new_reqs]
        return msgspec.structs.replace(scheduler_output, scheduled_new_reqs=new_requests)

    def _with_tokens(self, new: NewRequestData) -> NewRequestData:
        image_token = self.config.shape.image_token
        if new.task is None:
            return new
        tokens = list(new.token_ids)
        for feature in payload(new.task, MultiModalInputs).features:
            tokens[feature.offset : feature.offset + feature.length] = [image_token] * feature.length
        return msgspec.structs.replace(new, token_ids=tokens)

    def request_added(self, new: NewRequestData) -> None:
        """With its pictures, if it has any."""
        if new.task is not None:
            self._features[new.request_id] = payload(new.task, MultiModalInputs).features

    @torch.inference_mode()
    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Encode what this step needs for the first time."""
        work = WORK.of(scheduler_output.extras)
        if work is None:
            return
        for name in work.drop:
            del self._cache[name]
        for request_id, number in work.encode:
            started, feature = time.monotonic(), self._features[request_id][number]
            self._cache[feature.identifier] = self._encode(feature)
            if trace.on:
                seconds, tokens = round(time.monotonic() - started, 4), feature.length
                trace.emit(
                    "encoder.encoded", req=request_id, step=scheduler_output.step, image=number, tokens=tokens, seconds=seconds
                )  # fmt: skip

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Which rows of the step are places of pictures."""
        batch, at = self.runner.batch, 0
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            end = int(batch.num_computed[batch.row_of[request_id]])
            begin = end - count
            for feature in self._features.get(request_id, ()):
                first, last = max(begin, feature.offset), min(end, feature.offset + feature.length)
                if first < last:
                    vectors = self._cache[feature.identifier][first - feature.offset : last - feature.offset]
                    self._rows.put(inputs, at + first - begin, vectors)
            at += count

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """Pictures take the place of the token that stands for them."""
        return self._rows.run(inputs, run)
