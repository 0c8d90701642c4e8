"""The seams of scheduler and model runner: where a feature plugs in, and how it is installed.

For plain requests `hooks` is an empty list, and each seam costs one test of it. A hook is installed

- at start, if a setting asks for it (`VllmConfig.hooks`), or
- with the first request whose sampling parameters need it (`SamplingParams.HOOKS`).

Both name it as "module:Class", so that an unused feature is never imported.
vLLM calls these features by name, from its Scheduler and its GPUModelRunner. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stage03_engine.mixins import load

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stage03_engine.config import VllmConfig
    from stage03_engine.core.input_batch import StepInputs
    from stage03_engine.core.model_runner import ModelRunner
    from stage03_engine.core.models.layers import LanguageModel
    from stage03_engine.core.request import Request
    from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
    from stage03_engine.core.scheduler import Scheduler
    from stage03_engine.messages import EngineCoreOutput
    from stage04_kernels.sampler import SamplerOutput, SamplingMetadata


class SchedulerHook:
    """What a feature may add to the scheduler. The methods follow a request's life; hooks are called in the order of their
    installation. Only `poll` may read a clock or wait: decisions must be repeatable."""

    observes = False  # True: it changes nothing, and is called after those that do
    num_cpu_blocks = 0  # KV-cache blocks in CPU memory that the hook manages
    held_blocks: Collection[int] = ()
    """Blocks that the hook keeps in use (`BlockPool.touch`), also beyond their request's end, until it frees them. While there are any, steps go on, so
    that it hears when it may (vLLM: KVConnectorBase_V1.request_finished)."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        self.scheduler, self.config = scheduler, config

    def added(self, request: Request) -> None:
        """A request is about to be queued. Raises InvalidRequestError to refuse it; hooks that may refuse come first."""

    def traced_params(self, request: Request) -> dict[str, Any]:
        """What a replay needs to know about the request besides `Request.traced_params`."""
        return {}

    def poll(self) -> tuple[list[EngineCoreOutput], bool | None]:
        """Before each step: the last outputs of requests that the hook ended since (`Scheduler.finish_requests`), and whether there is
        something to run: True, one that it held back may run; False, nothing can, as far as it sees (it may have waited a moment for that to change);
        None, it does not know. One True is enough for a step."""
        return [], None

    def may_look_ahead(self) -> bool:
        """May the next step be decided before the tokens of the one that runs are known (`--async-scheduling`)?"""
        return True

    def holds(self, request: Request) -> bool:
        """A request is about to wait. True: the scheduler holds it, and others overtake it, until `released` names it. The answer stays the
        same until then: another hook may release the request first."""
        return False

    def released(self) -> Iterable[str]:
        """Before each decision: the requests that the hook held back, and holds back no longer."""
        return ()

    def num_matched(self, request: Request, num_computed: int) -> int:
        """How many of the request's tokens after the first `num_computed` the hook has keys and values of, all but its last token at
        most. Asked each time that the request might be admitted, so it changes nothing (vLLM: KVConnectorBase_V1.get_num_new_matched_tokens)."""
        return 0

    def admitted(
        self, request: Request, output: SchedulerOutput, new_blocks: list[int], first: int, num_matched: int
    ) -> None:
        """A request was admitted, or resumed. The hook brings the `num_matched` tokens that it has said, from token `first` on, into
        their places in `new_blocks` before the model runs (vLLM: update_state_after_alloc)."""

    def limited(self, request: Request, computed: int, num_tokens: int) -> int:
        """How many of the `num_tokens` tokens after the first `computed` the request gets in this step. 0: it waits, and so does who is behind it
        in the queue."""
        return num_tokens

    def preempted(self, request: Request, output: SchedulerOutput) -> bool:
        """A request is about to lose its blocks. True: the hook keeps its keys and values, and will match them."""
        return False

    def scheduled(self, output: SchedulerOutput) -> None:
        """Every request has its tokens; the hook may add to the decision. `num_computed_tokens` does not count them yet."""

    def decided(self, output: SchedulerOutput) -> None:
        """The decision is final, and `num_computed_tokens` counts it."""

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """The step ran; no token is appended yet. Returns outputs that go before those of the sampled requests."""
        return []

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """The new tokens of a request were appended; `new` may be changed. Returns the rule that ends the request (for the
        trace) if the hook set its `finish_reason`."""
        return None

    def finished(self, request: Request) -> None:
        """A request has ended, for any reason, and its blocks are free."""

    def updated(self, output: SchedulerOutput) -> None:
        """The step is over."""

    def check_invariants(self) -> None:
        """Raises AssertionError if the hook's own state contradicts the scheduler's (`--check-invariants`, and tests)."""

    def shutdown(self) -> None:
        """The engine ends."""


class RunnerHook:
    """What a feature may add to the model runner. The methods follow start-up, then a step."""

    rows_per_request = 1  # the most rows of logits that one request may have in a step
    observes = False  # True: it changes nothing, and is called after those that do
    kv_caches: Sequence[Tensor] = ()  # of its own, with the same blocks: who copies blocks copies these too

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        self.runner, self.config = runner, config

    def weights(self, tensors: Iterator[tuple[str, Tensor]], model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """Before the weights are loaded. `tensors` yields (name, values) one at a time. Returns what `model`, which has no values yet, is to
        load: fewer tensors, renamed or changed ones. The hook may also take out of `model` what is not loaded (vLLM: `weight_loader`)."""
        return tensors

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The weights are loaded. Returns the model to run."""
        return model

    def reserved_bytes(self) -> int:
        """How much of the device's memory the hook takes once the KV cache is allocated, which leaves room for it."""
        return 0

    def new_kv_caches(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """Room for as many blocks of `kv_caches`."""
        return []

    def cache_allocated(self, num_blocks: int) -> None:
        """The KV cache is allocated. Raises MemoryError if there is not enough memory for the hook's own."""

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """First in each step, before the batch is updated. Returns the decision that this runner carries out."""
        return scheduler_output

    def request_added(self, new: NewRequestData) -> None:
        """A request joined the batch, for the first time or again after a preemption."""

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """The batch is up to date with the scheduler. Also called in steps in which no token is scheduled."""

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """The inputs of the step are gathered; the hook may change which rows of logits are sampled, and the positions that the model sees."""

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """Hidden states [num_tokens, hidden_size]. `run` runs the model, or the next hook around it."""
        return run(inputs)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """Hidden states [num_tokens, hidden_size] are computed. True: do not sample from them."""
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

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """The step is over, and the batch holds the new tokens. Adds to what the scheduler is told. Also called in steps in which no token
        is scheduled."""

    def shutdown(self) -> None:
        """The engine ends."""


def install(names: Iterable[str], owner: Scheduler | ModelRunner, config: VllmConfig) -> None:
    """Add these hooks ("module:Class") to a scheduler or a model runner, each once."""
    for name in names:
        kind = load(name)
        if not any(isinstance(hook, kind) for hook in owner.hooks):
            owner.hooks.append(kind(owner, config))
            owner.hooks.sort(key=lambda hook: hook.observes)
