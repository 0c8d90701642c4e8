"""The two ends of a pipeline stage: hidden states come in from the stage before, and go out to the next (vLLM: IntermediateTensors).

The model files know nothing of it. In every stage but the first, a module that receives replaces the token embedding; in every stage but the last, a module that sends
replaces the final norm. It sends x + residual, one tensor [num_tokens, hidden_size]. The next stage takes that as its x, without a
residual, so its first norm gets the very sum that it would have computed itself. Float32 results are the same, bit for bit.

With tensor parallelism every worker of a stage has all of x and sends it to the worker with the same slice of the next stage.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from stage03_engine.core.features.distributed.parallel_state import receive_from_previous_stage, send_to_next_stage
from stage03_engine.core.features.distributed.pipeline_scheduler import NEW_TOKENS
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.stages import TIED, layer_range
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.sampling_params import SamplingParams

FINAL_NORMS = ("ln_f", "norm")
_PLAIN = SamplingParams(temperature=0)


class FirstEmbedding(nn.Module):
    """The token embedding of the first stage. It hides the weight, which would be taken for an output matrix."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids)
        return x


class ReceivedStates(nn.Module):
    """Instead of the token embedding: the hidden states of the previous stage, [num_tokens, hidden_size]. With tied weights, `weight` on the
    last stage is the output matrix."""

    def __init__(self, embedding: nn.Module, runner: ModelRunner) -> None:
        super().__init__()
        self.embedding, self.linked = embedding, is_linked(runner)
        self.hidden_size, self.dtype, self.device = runner.config.shape.hidden_size, runner.dtype, runner.device

    @property
    def weight(self) -> Tensor | None:
        """None if this stage does not have it."""
        return self.embedding.weight  # type: ignore[return-value]

    def forward(self, input_ids: Tensor) -> Tensor:
        empty = torch.empty(len(input_ids), self.hidden_size, dtype=self.dtype, device=self.device)
        return receive_from_previous_stage(empty, self.linked)


class NoPositions(nn.Module):
    """Instead of the position embedding, which the received states contain already."""

    def forward(self, positions: Tensor) -> float:
        return 0.0


class SentStates(nn.Module):
    """Instead of the final norm: sends the sum to the next stage. This stage's runner ignores the result."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.linked = is_linked(runner)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        send_to_next_stage(total, self.linked)
        return total, total


class EarlierStageHook(RunnerHook):
    """In every stage but the last, which alone samples. The sampled tokens come with a decision and are appended to the batch before it is
    applied, unless their request has left the batch meanwhile.

    Sampling settings and logprobs concern only the last stage, so the requests in this stage's batch have plain settings.
    """

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Append the tokens of the steps before; let the requests be plain."""
        output, batch, new = scheduler_output, self.runner.batch, NEW_TOKENS.of(scheduler_output.extras)
        for request_id, token_ids in (new.token_ids if new else {}).items():
            if request_id in batch.row_of:
                batch.append_tokens(batch.row_of[request_id], token_ids)
        if output.scheduled_new_reqs:
            plain = [msgspec.structs.replace(new, sampling_params=_PLAIN) for new in output.scheduled_new_reqs]
            output = msgspec.structs.replace(output, scheduled_new_reqs=plain)
        return output

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """Do not sample."""
        return True


def is_linked(runner: ModelRunner) -> bool:
    """Is there a trace, in which each event of a receiving stage names the event that sent? All workers agree on it."""
    return bool(runner.config.hooks("trace"))


def install_ends(model: nn.Module, runner: ModelRunner, own: Ranks) -> None:
    """Replace the parts that this stage lacks, once its weights are loaded and cut."""
    for name in TIED:
        if (embedding := getattr(model, name, None)) is None:
            continue
        if not own.is_first_stage:
            setattr(model, name, ReceivedStates(embedding, runner))
        else:
            setattr(model, name, FirstEmbedding(embedding))
    if not own.is_first_stage:
        if hasattr(model, "wpe"):
            model.wpe = NoPositions()
        _number_layers(model, runner, own)
    if not own.is_last_stage:
        for name in FINAL_NORMS:
            if hasattr(model, name):
                setattr(model, name, SentStates(runner))
        model.compute_logits = _no_logits  # type: ignore[assignment]
        if not any(isinstance(hook, EarlierStageHook) for hook in runner.hooks):  # a model may be loaded again
            runner.hooks.append(EarlierStageHook(runner, runner.config))


def _number_layers(model: nn.Module, runner: ModelRunner, own: Ranks) -> None:
    """Correct the scale that `scale_attn_by_inverse_layer_idx` asks for: it divides by a layer's number in the whole model."""
    shape = runner.config.shape
    if shape.scale_attn_by_inverse_layer_idx and hasattr(model, "h"):
        unscaled = shape.head_dim**-0.5 if shape.scale_attn_weights else 1.0
        for layer, block in zip(layer_range(shape.whole, own), model.h, strict=True):  # type: ignore[arg-type]
            block.attn.scale = unscaled / (layer + 1)


def _no_logits(hidden_states: Tensor) -> Tensor:
    """Logits of a one-token vocabulary: in these stages only the measurement of memory asks for logits."""
    return hidden_states.new_zeros(len(hidden_states), 1, dtype=torch.float32)
