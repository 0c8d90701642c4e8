"""The seams of scheduler and model runner: where a feature plugs in, and how it comes to be installed.

A plain request meets none of them: `hooks` is an empty list then, and each seam costs one look at it. A hook is installed for

- the whole engine, if a setting asks for it (`VllmConfig.hooks`), or
- from a request on, if one of its sampling parameters needs it (`SamplingParams.HOOKS`).

Both name it as "module:Class", so that an unused feature is never imported, and one that was taken out is missed only by its users. vLLM
calls these features by name, from its Scheduler and its GPUModelRunner. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stage03_engine.errors import InvalidRequestError
from stage03_engine.mixins import is_there, load

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stage03_engine.config import VllmConfig
    from stage03_engine.core.input_batch import StepInputs
    from stage03_engine.core.model_runner import ModelRunner
    from stage03_engine.core.request import Request
    from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
    from stage03_engine.core.scheduler import Scheduler
    from stage03_engine.messages import EngineCoreOutput
    from stage03_engine.sampling_params import SamplingParams
    from stage04_kernels.sampler import SamplerOutput, SamplingMetadata


class SchedulerHook:
    """What a feature may add to the scheduler. Methods are called in the order of a request's life, hooks in that of their
    installation. No hook but `poll` may look at a clock or wait: decisions must be repeatable."""

    observes = False  # True: it changes nothing, and is called after those that do
    num_cpu_blocks = 0  # KV-cache blocks in CPU memory that the hook looks after

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        self.scheduler, self.config = scheduler, config

    def added(self, request: Request) -> None:
        """A request is about to be queued. Raises InvalidRequestError to refuse it: what may do so is installed first."""

    def traced_params(self, request: Request) -> dict[str, Any]:
        """What a replay needs to know of the request besides `Request.traced_params`."""
        return {}

    def poll(self) -> tuple[list[EngineCoreOutput], bool]:
        """Before each step: the last outputs of requests that the hook ended meanwhile (`Scheduler.finish_requests`), and
        whether any request can run. If not there is no step; the hook may have waited a moment for that to change."""
        return [], True

    def is_ready(self, request: Request) -> bool:
        """May this waiting request be admitted? If not, others overtake it."""
        return True

    def admitted(self, request: Request, output: SchedulerOutput, new_blocks: list[int], num_hits: int) -> None:
        """A request was admitted, or resumed. Of `new_blocks` the first `num_hits` came from the prefix cache. Its
        `num_computed_tokens` counts the larger of these and of what it had when it was preempted."""

    def preempted(self, request: Request, output: SchedulerOutput) -> bool:
        """A request is about to lose its blocks. True: its computed tokens are safe elsewhere, and need not be computed again."""
        return False

    def scheduled(self, output: SchedulerOutput) -> None:
        """Every request has its tokens; the hook may add to the decision. `num_computed_tokens` does not count them yet."""

    def decided(self, output: SchedulerOutput) -> None:
        """The decision is final, and `num_computed_tokens` counts it."""

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The step was executed, and no token appended yet. Returns outputs that go before those of the sampled requests."""
        return []

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """The new tokens of a request were appended; `new` may be changed. Returns the rule that ends the request (for the
        trace) if the hook set its `finish_reason`."""
        return None

    def finished(self, request: Request) -> None:
        """A request has ended, for whatever reason, and its blocks are free."""

    def updated(self, output: SchedulerOutput) -> None:
        """The step is over."""

    def check_invariants(self) -> None:
        """Raises AssertionError if the hook's own state contradicts the scheduler's (`--check-invariants`, and tests)."""

    def shutdown(self) -> None:
        """The engine ends."""


class RunnerHook:
    """What a feature may add to the model runner, in the order of start-up and of a step."""

    rows_per_request = 1  # most rows of logits that one request may take in a step
    observes = False  # True: it changes nothing, and is called after those that do

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        self.runner, self.config = runner, config

    def model_loaded(self, model: nn.Module) -> nn.Module:
        """The weights are loaded. Returns the model to run."""
        return model

    def cache_allocated(self, num_blocks: int) -> None:
        """The KV cache is in place, for good. Raises MemoryError if there is not enough for the hook's own."""

    def request_added(self, new: NewRequestData) -> None:
        """A request joined the batch, for the first time or again after a preemption."""

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """The batch is up to date with the scheduler. Also called in steps in which no token is scheduled."""

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """The inputs of the step are gathered; the hook may change which rows of logits are sampled."""

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """Hidden states [num_tokens, hidden_size] if the hook runs the model instead of the runner. The first that does wins."""
        return None

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """Hidden states [num_tokens, hidden_size] are there. True: nothing is to be sampled from them."""
        return False

    def logits(self, logits: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> Tensor:
        """Logits [num_rows, vocab_size] before the sampler sees them. Returns new ones, or the same."""
        return logits

    def sampling_metadata(
        self, metadata: SamplingMetadata, inputs: StepInputs, scheduler_output: SchedulerOutput
    ) -> SamplingMetadata:
        """The settings of the sampler. Returns new ones, or the same."""
        return metadata

    def after_sample(self, sampled: dict[str, list[int]], output: SamplerOutput, inputs: StepInputs) -> None:
        """Token ids by request, one per row of logits; the hook may drop some from the end of a list."""

    def collect(self, output: ModelRunnerOutput, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """The batch holds the new tokens. Adds to what the scheduler is told. Also called in steps without any sampled token."""

    def shutdown(self) -> None:
        """The engine ends."""


def install(names: Iterable[str], owner: Scheduler | ModelRunner, config: VllmConfig) -> None:
    """Add these hooks ("module:Class") to a scheduler or a model runner, each once."""
    for name in names:
        kind = load(name)
        if not any(isinstance(hook, kind) for hook in owner.hooks):
            owner.hooks.append(kind(owner, config))
            owner.hooks.sort(key=lambda hook: hook.observes)


def hooks_of(params: SamplingParams, seam: str) -> list[str]:
    """The hooks ("module:Class") that a request needs at a seam: "scheduler" or "runner".

    Raises InvalidRequestError that names the field if its feature was taken out.
    """
    names = []
    for field, name in params.hooks(seam).items():
        if not is_there(name.partition(":")[0]):
            raise InvalidRequestError(f"{field}: this engine was built without it.", field)
        names.append(name)
    return names
