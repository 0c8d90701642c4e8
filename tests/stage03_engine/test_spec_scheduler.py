"""Drafts in the scheduler against a toy model whose right answer is known: whatever is guessed, right or wrong, nothing but
the number of steps may change."""

from __future__ import annotations

import copy
import zlib

import pytest
from hypothesis import given, strategies as st
from toy_runner import make_scheduler

from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.spec_decode.draft_scheduler import NEXT_DRAFTS, SCHEDULED_DRAFTS, NextDrafts
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest, FinishReason, TokenLogprobs
from stage03_engine.sampling_params import SamplingParams

EOS = 7
MAX_LEN = 40


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % 50


def make_request(request_id: str, prompt: list[int], params: SamplingParams) -> Request:
    return Request(EngineCoreRequest(request_id, prompt, params, eos_token_id=EOS), seed=0)


def right_answer(prompt: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
    request = make_request("r", prompt, params)
    while True:
        output = request.append_output_tokens([next_token(request.all_token_ids)], MAX_LEN)
        if output.finish_reason is not None:
            return request.all_token_ids[len(prompt) :], output.finish_reason


class DraftingRunner:
    """A worker that knows only the deltas; its drafts are right up to where `quality` says."""

    def __init__(self, block_size: int, quality: list[int], num_drafts: int) -> None:
        self.block_size, self.quality, self.num_drafts = block_size, quality, num_drafts
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.contents: dict[int, tuple[int, ...]] = {}  # slot -> the tokens up to and with the one whose keys it holds
        self.calls = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            for known in (self.tokens, self.computed, self.tables):
                known.pop(request_id, None)
        for request_id, blocks in output.new_block_ids.items():
            self.tables[request_id] += blocks
        for new in output.scheduled_new_reqs:
            self.tokens[new.request_id] = list(new.token_ids)
            self.computed[new.request_id] = new.num_computed_tokens
            self.tables[new.request_id] = list(new.block_ids)
        answer = ModelRunnerOutput({})
        written: set[int] = set()
        for request_id, count in output.num_scheduled_tokens.items():
            self._run(request_id, count, drafts_of(output).get(request_id, []), written, answer)
        return answer

    def _slot(self, request_id: str, position: int) -> int:
        return self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size

    def _run(
        self, request_id: str, count: int, drafts: list[int], written: set[int], answer: ModelRunnerOutput
    ) -> None:
        known, start = self.tokens[request_id], self.computed[request_id]
        inputs = known + drafts
        for position in range(start, start + count):
            slot = self._slot(request_id, position)
            assert slot >= self.block_size and slot not in written and position < MAX_LEN
            written.add(slot)
            self.contents[slot] = tuple(inputs[: position + 1])
        for position in range(start + count):
            assert self.contents[self._slot(request_id, position)] == tuple(inputs[: position + 1]), (
                "foreign keys are read"
            )
        self.computed[request_id] = start + count
        if start + count < len(known):
            assert not drafts
            return
        assert start + count == len(inputs)
        sampled = [next_token(inputs[: len(known) + i]) for i in range(len(drafts) + 1)]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
            accepted += 1
        self.computed[request_id] -= len(drafts) - accepted
        del self.tables[request_id][cdiv(self.computed[request_id], self.block_size) :]
        known += sampled[: accepted + 1]
        answer.sampled_token_ids[request_id] = sampled[: accepted + 1]
        answer.add(request_id, NEXT_DRAFTS, NextDrafts(self._draft(known)))

    def _draft(self, known: list[int]) -> list[int]:
        self.calls += 1
        right = self.quality[self.calls % len(self.quality)]
        text = list(known)
        for i in range(self.num_drafts):
            text.append(next_token(text) if i < right else 99)
        return text[len(known) :]


def drafts_of(output: SchedulerOutput) -> dict[str, list[int]]:
    scheduled = SCHEDULED_DRAFTS.of(output.extras)
    return scheduled.token_ids if scheduled else {}


def assert_drafts_take_nothing(before: Scheduler, decision: SchedulerOutput) -> None:
    """The same decision as if nobody had drafts, and then the drafts."""
    for request in before.requests.values():
        request.spec_token_ids = []
    plain = before.schedule()
    drafts = {r: len(tokens) for r, tokens in drafts_of(decision).items()}
    assert plain.preempted_req_ids == decision.preempted_req_ids
    without = {r: count - drafts.get(r, 0) for r, count in decision.num_scheduled_tokens.items()}
    assert plain.num_scheduled_tokens == without
    assert all(count > 0 for count in drafts.values())


workloads = st.lists(
    st.tuples(
        st.lists(st.integers(0, 49), min_size=1, max_size=MAX_LEN - 1),
        st.integers(1, 30),  # max_tokens
        st.booleans(),  # ignore_eos
        st.lists(st.integers(0, 49), max_size=2),  # stop_token_ids
        st.integers(0, 8),  # arrives at this step
    ),
    min_size=1,
    max_size=6,
)


@given(
    workloads,
    st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 64))),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_drafts_change_nothing_but_the_pace(
    workload, limits, block_size, spare, chunked, caching, quality, num_drafts
) -> None:
    max_num_seqs, budget = limits
    if not chunked:
        budget = max(budget, MAX_LEN)
    num_blocks = 1 + cdiv(MAX_LEN, block_size) + spare
    scheduler = make_scheduler(
        max_num_seqs, budget, num_blocks, block_size, caching=caching, enable_chunked_prefill=chunked
    )
    runner = DraftingRunner(block_size, quality, num_drafts)
    outputs: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    params = {
        f"r{i}": SamplingParams(max_tokens=count, ignore_eos=ignore, stop_token_ids=stops)
        for i, (_, count, ignore, stops, _) in enumerate(workload)
    }
    for step in range(2000):
        for i, (prompt, *_, arrival) in enumerate(workload):
            if arrival == step:
                scheduler.add_request(make_request(f"r{i}", prompt, params[f"r{i}"]))
        before = copy.deepcopy(scheduler)
        decision = scheduler.schedule()
        assert decision.total_num_scheduled_tokens <= budget
        assert_drafts_take_nothing(before, decision)
        check_invariants(scheduler)
        for output in scheduler.update_from_output(decision, runner.execute(decision)):
            assert output.request_id not in reasons, "a request spoke after its end"
            outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        check_invariants(scheduler)
        for request in scheduler.running:  # nothing is held for drafts between the steps
            held = len(scheduler.kv_cache_manager.block_table(request.request_id))
            assert held == cdiv(request.num_computed_tokens, block_size)
        if step > 8 and not scheduler.has_unfinished_requests:
            break
    else:
        pytest.fail("some request never ended")
    assert scheduler.kv_cache_manager.block_pool.num_free == num_blocks - 1, "blocks leaked"
    for i, (prompt, *_) in enumerate(workload):
        assert (outputs[f"r{i}"], reasons[f"r{i}"]) == right_answer(prompt, params[f"r{i}"])


def test_the_budget_and_the_blocks_cut_the_drafts() -> None:
    def drafts_with(budget: int, num_blocks: int) -> dict[str, int]:
        scheduler = make_scheduler(8, budget, num_blocks)
        for name in "ab":
            scheduler.add_request(make_request(name, [1] * 6, SamplingParams(max_tokens=10, ignore_eos=True)))
        decision = scheduler.schedule()
        answer = ModelRunnerOutput({"a": [3], "b": [3]})
        for name in "ab":
            answer.add(name, NEXT_DRAFTS, NextDrafts([4] * 5))
        scheduler.update_from_output(decision, answer)
        decision = scheduler.schedule()
        return {name: len(tokens) for name, tokens in drafts_of(decision).items()}

    assert drafts_with(64, 20) == {"a": 5, "b": 5}
    assert drafts_with(12, 20) == {"a": 5, "b": 5}
    # Two blocks each hold 8 positions: of the 6 + 1 tokens the seventh is computed now, and one draft fits behind it.
    assert drafts_with(64, 1 + 4) == {"a": 1, "b": 1}
    assert drafts_with(64, 1 + 5) == {"a": 5, "b": 1}


def test_logprobs_end_with_the_tokens() -> None:
    scheduler = make_scheduler(8, 64, 20)
    scheduler.add_request(make_request("a", [1] * 6, SamplingParams(max_tokens=20, logprobs=0)))
    first = scheduler.schedule()
    answer = ModelRunnerOutput({"a": [3]})
    answer.add("a", NEXT_DRAFTS, NextDrafts([4, EOS, 5]))
    scheduler.update_from_output(first, answer)
    logprobs = [TokenLogprobs([token], [0.0], 1) for token in (4, EOS, 5, 6)]
    answer = ModelRunnerOutput({"a": [4, EOS, 5, 6]}, {"a": logprobs})
    [output] = scheduler.update_from_output(scheduler.schedule(), answer)
    assert (output.new_token_ids, output.new_logprobs) == ([4, EOS], logprobs[:2])
    assert output.finish_reason == FinishReason.STOP and not scheduler.has_unfinished_requests
