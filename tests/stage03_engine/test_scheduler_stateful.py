"""The scheduler as a state machine: arrivals, steps, aborts and cache resets in any order, under any policy.

The naive model of a request is its right answer (toy_runner.right_answer); the naive model of the KV cache is the toy's, where
every slot says for which prefix it was written. About 10,000 rules run in a few seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import msgspec
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from toy_runner import MAX_LEN, ToyRunner, make_request, make_scheduler, right_answer

from stage03_engine.core.features.async_scheduling.async_scheduler import AsyncScheduler
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.distributed.pipeline_scheduler import PipelineScheduler
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import FinishReason
from stage03_engine.sampling_params import SamplingParams

STEM = [(7 * i) % 50 + 50 for i in range(MAX_LEN)]  # most prompts begin alike, so that prefixes hit


class SchedulerMachine(RuleBasedStateMachine):
    kind = Scheduler

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        block_size = data.draw(st.sampled_from([1, 2, 4, 16]))
        max_num_seqs = data.draw(st.integers(1, 6))
        chunked = data.draw(st.booleans())
        budget = data.draw(st.integers(max_num_seqs, 64)) if chunked else 64
        self.num_blocks = 1 + -(-MAX_LEN // block_size) + data.draw(st.integers(0, 25))
        self.scheduler = make_scheduler(
            max_num_seqs, budget, self.num_blocks, block_size,
            caching=data.draw(st.booleans()), swap_blocks=data.draw(st.sampled_from([0, 2, 60])),
            enable_chunked_prefill=chunked, scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority", "fair"])),
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 5])) if chunked else 0, kind=self.kind,
        )  # fmt: skip
        self.runner = ToyRunner(self.scheduler)
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    @rule(
        shared=st.integers(0, MAX_LEN - 4), own=st.lists(st.integers(0, 49), min_size=1, max_size=3), count=st.integers(1, 20),
        ignore_eos=st.booleans(), stop=st.sampled_from([[], [3, 11, 30]]), priority=st.integers(-1, 1), salt=st.sampled_from([None, None, "s"]), group=st.integers(0, 2),
    )  # fmt: skip
    def arrive(
        self, shared: int, own: list[int], count: int, ignore_eos: bool, stop: list[int], priority: int, salt: str | None,
        group: int,
    ) -> None:  # fmt: skip
        name, prompt = f"cmpl-{group}-{len(self.expected)}", STEM[:shared] + own
        params = SamplingParams(max_tokens=count, ignore_eos=ignore_eos, stop_token_ids=stop)
        self.expected[name], self.outputs[name] = right_answer(prompt, params), []
        self.runner.salts[name] = salt
        self.scheduler.add_request(make_request(name, prompt, params, priority, salt))

    @rule()
    def step(self) -> None:
        decision = self.scheduler.schedule()
        check_invariants(self.scheduler)
        assert decision.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(decision.num_scheduled_tokens) <= self.scheduler.config.max_num_seqs
        assert decision.num_scheduled_tokens or not self.scheduler.has_unfinished_requests, "work waits, nothing runs"
        self.update(decision, self.runner.execute(decision))

    def update(self, decision: SchedulerOutput, sampled: ModelRunnerOutput) -> None:
        for output in self.scheduler.update_from_output(decision, sampled):
            name = output.request_id
            assert name not in self.ended, "a request spoke after its end"
            self.outputs[name] += output.new_token_ids
            tokens, reason = self.expected[name]
            assert self.outputs[name] == tokens[: len(self.outputs[name])]
            assert (output.finish_reason is not None) == (self.outputs[name] == tokens)
            if output.finish_reason is not None:
                assert output.finish_reason == reason
                self.ended.add(name)
        check_invariants(self.scheduler)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.scheduler.finish_requests([name])
        self.ended.add(name)
        check_invariants(self.scheduler)

    @rule()
    def reset(self) -> None:
        assert reset(self.scheduler) == (not self.scheduler.running)

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.has_unfinished_requests

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.is_idle:
                break
            self.step()
        assert self.ended == self.expected.keys(), "some request never ended"
        assert self.scheduler.kv_cache_manager.block_pool.num_free == self.num_blocks - 1, "blocks leaked"


class AsyncSchedulerMachine(SchedulerMachine):
    """Steps overlap: a second one is decided while the first is in flight. The model may run a step at once, or as late as its
    results are asked for; arrivals, aborts and resets come in between."""

    kind = AsyncScheduler

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: deque[SchedulerOutput] = deque()
        self.ran: deque[ModelRunnerOutput] = deque()

    @rule()
    def step(self) -> None:
        scheduler = self.scheduler
        while (
            len(self.in_flight) < 2 and scheduler.can_look_ahead()
            if self.in_flight
            else scheduler.has_unfinished_requests
        ):
            self.decide()
        if self.in_flight:
            self.run_model()
            self.update(self.in_flight.popleft(), self.ran.popleft())

    def decide(self) -> None:
        decision, alone = self.scheduler.schedule(), not self.in_flight
        check_invariants(self.scheduler)
        assert decision.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(decision.num_scheduled_tokens) <= self.scheduler.config.max_num_seqs
        assert decision.num_scheduled_tokens or not alone, "work waits, nothing runs"
        for request in self.scheduler.requests.values():
            assert request.num_tokens == len(request.all_token_ids), "a token that is not known yet is counted"
            most = min(request.num_prompt_tokens + request.sampling_params.max_tokens, MAX_LEN)
            assert request.num_computed_tokens < most, "a step computes a token after the last"
        self.in_flight.append(decision)

    @precondition(lambda self: len(self.ran) < len(self.in_flight))
    @rule()
    def run_model(self) -> None:
        """The next step in flight, unless it has run."""
        if len(self.ran) < len(self.in_flight):
            self.ran.append(self.runner.execute(self.in_flight[len(self.ran)]))

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.scheduler.has_unfinished_requests


class PipelineSchedulerMachine(AsyncSchedulerMachine):
    """As many steps in flight as there are stages, and none for a request whose next token is in flight. The last stage runs them in order, and
    a preempted request's tokens are computed again."""

    kind = PipelineScheduler

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        super().build(data)
        self.stages = data.draw(st.integers(2, 4))
        groups = data.draw(st.booleans())
        self.scheduler.config = replace(self.scheduler.config, pipeline_stages=self.stages, pipeline_groups=groups)

    def decide(self) -> None:
        """What is sent does not change afterwards."""
        super().decide()
        self.in_flight[-1] = msgspec.msgpack.decode(msgspec.msgpack.encode(self.in_flight[-1]), type=SchedulerOutput)

    @rule()
    def step(self) -> None:
        scheduler = self.scheduler
        while (
            len(self.in_flight) < self.stages and scheduler.can_schedule()
            if self.in_flight
            else scheduler.has_unfinished_requests
        ):
            self.decide()
        if self.in_flight:
            self.run_model()
            self.update(self.in_flight.popleft(), self.ran.popleft())


TestPipelineScheduler = PipelineSchedulerMachine.TestCase
TestPipelineScheduler.settings = settings(stateful_step_count=50)
TestAsyncScheduler = AsyncSchedulerMachine.TestCase
TestAsyncScheduler.settings = settings(stateful_step_count=50)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=50)
