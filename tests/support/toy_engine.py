"""An engine without a model that records: the real scheduler, and a runner that draws tokens, drafts and grammars at random from
a seed. For the tests of replay, of `check`, `why` and `diff`, which need recordings of every kind in milliseconds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stage03_engine.config import CacheConfig, SchedulerConfig, VllmConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.features.async_scheduling.async_scheduler import AsyncScheduler
from stage03_engine.core.features.async_scheduling.manifest import SCHEDULER
from stage03_engine.core.features.distributed.manifest import PIPELINE_SCHEDULER
from stage03_engine.core.features.distributed.pipeline_scheduler import PipelineScheduler
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset
from stage03_engine.core.features.prompt_logprobs.scheduler_hook import FOUND, Found, PromptLogprobsSchedulerHook
from stage03_engine.core.features.spec_decode.draft_scheduler import (
    NEXT_DRAFTS,
    SCHEDULED_DRAFTS,
    DraftHook,
    NextDrafts,
)
from stage03_engine.core.features.structured_output.manager import Accepted, StructuredOutputManager
from stage03_engine.core.features.structured_output.scheduler_hook import GrammarSchedulerHook
from stage03_engine.core.features.swap_space.swap_space import SWAPS, SwapHook, Swaps
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

EOS = 7
ANY_JSON = StructuredOutputsParams(json_object=True)
STEM = [(7 * i) % 50 + 50 for i in range(200)]  # most prompts begin alike, so that prefixes hit


class RandomGrammars(StructuredOutputManager):
    """Ready sooner or later, late with a token, complete or failed now and then."""

    num_not_ready = num_known = 0

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.ready, self.late = rng, dict[str, bool](), dict[str, None]()
        self.late_rate, self.end_rate = 0.3, 1.0

    def grammar_init(
        self, request_id: str, params: SamplingParams, salt: str | None = None, tenant: int | None = None
    ) -> None:
        self.ready[request_id] = False

    def poll(self) -> list[EngineCoreOutput]:
        return []

    def wait(self, timeout: float) -> None:
        pass

    def take_ready(self) -> list[str]:
        ready = [i for i, is_ready in self.ready.items() if not is_ready and self.rng.random() < 0.4]
        self.ready.update(dict.fromkeys(ready, True))
        return ready

    def grammar_bitmask(self, request_ids: list[str]) -> dict[str, bytes] | None:
        return None

    def is_moving(self, request_id: str) -> bool:
        return request_id in self.late

    def accept_tokens(self, sampled: dict[str, list[int]]) -> Accepted:
        assert not self.late.keys() & sampled.keys(), "a request ran that was to sit out"
        mine = [i for i in [*self.late, *sampled] if i in self.ready]
        self.late = dict.fromkeys(i for i in mine if self.rng.random() < self.late_rate)
        mine = [i for i in mine if i not in self.late]
        failed = {i for i in mine if self.rng.random() < 0.1 * self.end_rate}
        complete = {i for i in mine if self.rng.random() < 0.2 * self.end_rate}
        errors = {i: EngineCoreOutput(i, [], None, FinishReason.ERROR, error="stuck") for i in failed}
        return Accepted(set(mine), complete, errors)

    def free(self, request_id: str) -> None:
        self.ready.pop(request_id, None)
        self.late.pop(request_id, None)


class ToyEngine:
    """`EngineCore` as far as a recording is concerned."""

    kind = Scheduler

    def __init__(
        self, seed: int = 0, *, num_blocks: int = 64, max_model_len: int = 96, swap_blocks: int = 0, num_drafts: int = 0,
        block_size: int = 4, caching: bool = True, **scheduling: Any,
    ) -> None:  # fmt: skip
        self.rng, self.num_drafts = random.Random(seed), num_drafts
        mode = "swap" if swap_blocks else "recompute"
        config = SchedulerConfig(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "preemption_mode": mode} | scheduling
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
        if trace.on:
            trace.emit(
                "scheduler.created", max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens, num_blocks=num_blocks, num_swap_blocks=swap_blocks,
                scheduler_config=asdict(config), cache_config=asdict(replace(cache, prefix_caching_hash_seed=None)),
            )  # fmt: skip
        self.grammars = grammars = RandomGrammars(self.rng)
        pool = BlockPool(num_blocks)
        self.scheduler = self.kind(config, cache, pool, max_model_len, os.urandom(8))
        vllm_config = VllmConfig()
        self.scheduler.hooks = [
            PromptLogprobsSchedulerHook(self.scheduler, vllm_config),
            GrammarSchedulerHook(self.scheduler, vllm_config, grammars),
            DraftHook(self.scheduler, vllm_config),
        ]
        if swap_blocks:
            self.scheduler.hooks.append(SwapHook(self.scheduler, vllm_config, swap_blocks))

    def add(self, request_id: str, prompt: list[int], priority: int = 0, **params: Any) -> None:
        message = EngineCoreRequest(request_id, prompt, SamplingParams(**params), eos_token_id=EOS, priority=priority)
        message.tenant = (None, 0, 1)[len(prompt) % 3]
        self.scheduler.add_request(Request(message, seed=0))

    def add_random(self, request_id: str) -> None:
        """A request of any kind."""
        rng = self.rng
        prompt = STEM[: rng.choice([0, 3, 8, 17, 40])] + [rng.randrange(50) for _ in range(rng.randint(1, 3))]
        self.add(
            request_id, prompt, rng.randint(-1, 1), max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.5,
            min_tokens=0, stop_token_ids=rng.choice([[], [3], [EOS, 5]]), prompt_logprobs=rng.choice([None, None, 0]),
            structured_outputs=rng.choice([None, None, None, ANY_JSON]),
        )  # fmt: skip

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_unfinished_requests

    def step(self) -> SchedulerOutput:
        output = self._begin()
        self._end(output, self._execute(output))
        return output

    def _begin(self) -> SchedulerOutput:
        for hook in self.scheduler.hooks:
            hook.poll()
        running, waiting = len(self.scheduler.running), self.scheduler.num_waiting
        if trace.on:
            trace.emit("engine.step", ph="B", step=self.scheduler.step + 1, running=running, waiting=waiting)
        return self.scheduler.schedule()

    def _end(self, output: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        self.scheduler.update_from_output(output, answer)
        running, waiting = len(self.scheduler.running), self.scheduler.num_waiting
        if trace.on:
            trace.emit("engine.step", ph="E", step=output.step, running=running, waiting=waiting)

    def run(self, most: int = 10_000) -> None:
        """Until everybody has ended."""
        while not self.is_idle and most:
            self.step()
            most -= 1
        assert most, "the engine does not come to an end"

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        swaps = SWAPS.of(output.extras) or Swaps()
        swapped = len(swaps.out), len(swaps.back)
        scheduled = SCHEDULED_DRAFTS.of(output.extras)
        if trace.on and any(swapped):
            trace.emit("kv.swapped", step=output.step, num_out=swapped[0], num_in=swapped[1])
        answer = ModelRunnerOutput({})
        for request_id, count in output.num_scheduled_tokens.items():
            request, computed = self._computed(request_id, output.step)
            drafts = scheduled.token_ids.get(request_id, []) if scheduled else []
            first = computed - count
            last = min(first + count, request.num_prompt_tokens - 1)
            if request.sampling_params.prompt_logprobs is not None and first < last:
                answer.add(request_id, FOUND, Found(first, [TokenLogprobs([], [], 0)] * (last - first)))
            if computed == request.num_tokens + len(drafts):
                self._sample(request, drafts, output.step, answer)
        return answer

    def _computed(self, request_id: str, step: int) -> tuple[Request, int]:
        """A request that the model computes in this step, and how many of its tokens are computed then."""
        request = self.scheduler.requests[request_id]
        return request, request.num_computed_tokens

    def _sample(self, request: Request, drafts: list[int], step: int, answer: ModelRunnerOutput) -> None:
        accepted = drafts[: self.rng.randint(0, len(drafts))]
        token = (request.num_tokens * 5 + len(accepted)) % 50 if self.rng.random() < 0.8 else self.rng.randrange(12)
        answer.sampled_token_ids[request.request_id] = [*accepted, token]
        proposed = [self.rng.randrange(50) for _ in range(self.rng.randint(0, self.num_drafts))]
        if proposed and request.sampling_params.structured_outputs is None:
            answer.add(request.request_id, NEXT_DRAFTS, NextDrafts(proposed))
            if trace.on:
                count = len(proposed)
                trace.emit("spec.proposed", req=request.request_id, step=step, num_tokens=count, token_ids=[])


class AsyncToyEngine(ToyEngine):
    """`AsyncEngineCore` as far as a recording is concerned: the model runs a step when its results are asked for, and then knows
    only what it was told when the step was decided."""

    kind: type[Scheduler] = AsyncScheduler
    setting: dict[str, Any] = {"async_scheduling": True, "scheduler_cls": SCHEDULER}

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        super().__init__(seed, **self.setting, **settings)
        self.in_flight: list[SchedulerOutput] = []
        self.told: dict[int, dict[str, tuple[Request, int]]] = {}  # step -> request -> (itself, tokens computed then)

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and super().is_idle

    def step(self) -> SchedulerOutput:
        scheduler = self.scheduler
        while self._may_start() if self.in_flight else scheduler.requests:
            output, requests = self._begin(), scheduler.requests
            self.told[output.step] = {
                i: (requests[i], requests[i].num_computed_tokens) for i in output.num_scheduled_tokens
            }
            self.in_flight.append(output)
        output = self.in_flight.pop(0)
        self._end(output, self._execute(output))
        return output

    def _may_start(self) -> bool:
        assert isinstance(self.scheduler, AsyncScheduler)
        return len(self.in_flight) == 1 and self.scheduler.can_look_ahead()

    def _computed(self, request_id: str, step: int) -> tuple[Request, int]:
        return self.told[step][request_id]


class PipelineToyEngine(AsyncToyEngine):
    """`PipelineEngineCore` in the same way, with three stages."""

    kind = PipelineScheduler
    setting = {"pipeline_stages": 3, "scheduler_cls": PIPELINE_SCHEDULER}

    def _may_start(self) -> bool:
        assert isinstance(self.scheduler, PipelineScheduler)
        return len(self.in_flight) < 3 and self.scheduler.can_schedule()


def random_life(engine: ToyEngine, num_requests: int) -> None:
    """Arrivals, steps, aborts and resets of the prefix cache in any order."""
    rng, fair = engine.rng, engine.scheduler.config.scheduling_policy == "fair"
    names = [f"cmpl-{i % 3}-{i}" if fair else f"r{i}" for i in range(num_requests)]  # fair: of three HTTP requests
    for i in range(num_requests):
        engine.add_random(names[i])
        for _ in range(rng.choice([0, 0, 1, 3])):
            if not engine.is_idle:
                engine.step()
        if rng.random() < 0.15:
            engine.scheduler.finish_requests([names[rng.randint(0, i)]])
        if rng.random() < 0.1:
            reset(engine.scheduler)
    engine.run()


def record(directory: Path, life: Callable[[], None]) -> Path:
    """Record what `life` does, in this process, to a folder; returns the folder."""
    trace.hold("EngineCore_DP0")
    trace.open(str(directory))
    try:
        life()
    finally:
        trace.close()
    return directory
