"""Logits processors that a user brings: `--logits-processors module:Class` (vLLM: v1/sample/logits_processor/interface.py).

vLLM reports to a processor with `update_state` which rows of the batch came, went and moved, and it keeps its own
picture of the batch. Here `apply` gets the rows themselves, every time. That costs one small object per sampled row, and only
when there is a processor; in return a processor needs no state of its own, and its picture can never be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.own_classes.construct import construct, import_class
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.errors import ConfigError
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.sampler import RowsTransform, SamplingMetadata
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.input_batch import StepInputs
    from stage03_engine.core.model_runner import ModelRunner


@dataclass(frozen=True)
class LogitsRow:
    """The request behind one row of logits. The arrays are views of the engine's own: read, do not write."""

    request_id: str
    sampling_params: SamplingParams  # `extra_args` is what the client sent as vllm_xargs
    prompt_token_ids: np.ndarray  # int64
    output_token_ids: np.ndarray  # int64; empty before the first token


class LogitsProcessor(ABC):
    """What a user's class must be. One object lives as long as the engine; it is called once per step."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:  # noqa: B027
        """Called once, in the engine process, before the weights are loaded."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True when `apply` never changes which logit is the largest. Such a processor is skipped for greedy requests, and runs
        after the temperature; another one runs before it, after the built-in rules, for all requests."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: list[LogitsRow]) -> Tensor:
        """Logits [len(rows), vocab_size] float32 -> new ones of the same shape. -inf forbids a token. The logprobs that
        clients see are those of the raw logits."""


def load_logits_processors(config: VllmConfig, device: torch.device) -> list[LogitsProcessor]:
    """The processors that the configuration names, in its order. Raises ConfigError that names the class."""
    processors = []
    for path in config.model_config.logits_processors or ():
        found = import_class(path, "--logits-processors")
        if not issubclass(found, LogitsProcessor):
            raise ConfigError(f"--logits-processors {path}: not a subclass of {__name__}:LogitsProcessor")
        processors.append(construct(path, "--logits-processors", config, device))
        if trace.on:
            trace.emit("logits_processor.loaded", path=path, argmax_invariant=processors[-1].is_argmax_invariant())
    return processors


class LogitsProcessorHook(RunnerHook):
    """Installed with `--logits-processors`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.processors = load_logits_processors(config, runner.device)

    def sampling_metadata(
        self, metadata: SamplingMetadata, inputs: StepInputs, scheduler_output: SchedulerOutput
    ) -> SamplingMetadata:
        """The processors as transforms of the sampler."""
        batch = self.runner.batch
        rows = [
            LogitsRow(batch.request_ids[row], batch.requests[row].sampling_params, *batch.tokens_of(row))
            for row in inputs.sampled
        ]
        before, after_temperature = transforms(self.processors, rows)
        return replace(
            metadata,
            before=[*metadata.before, *before],
            after_temperature=[*metadata.after_temperature, *after_temperature],
        )


def transforms(
    processors: list[LogitsProcessor], rows: list[LogitsRow]
) -> tuple[list[RowsTransform], list[RowsTransform]]:
    """What the sampler calls before and after the temperature; `rows` are all rows of the step."""

    def transform_of(processor: LogitsProcessor) -> RowsTransform:
        def transform(logits: Tensor, numbers: list[int]) -> Tensor:
            result = processor.apply(logits, [rows[number] for number in numbers])
            if not isinstance(result, Tensor) or result.shape != logits.shape:
                name = type(processor).__name__
                raise TypeError(f"logits processor {name} must return logits of shape {list(logits.shape)}")
            return result

        transform.__name__ = f"custom:{type(processor).__name__}"
        return transform

    before = [transform_of(p) for p in processors if not p.is_argmax_invariant()]
    return before, [transform_of(p) for p in processors if p.is_argmax_invariant()]
