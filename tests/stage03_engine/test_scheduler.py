"""The scheduler against a toy model: no tensors, no clock, milliseconds.

The toy's next token is a hash of all tokens before it. So the right output of a request is known without any scheduler, and
any mistake in chunking, preemption or bookkeeping changes it.
"""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings, strategies as st

from stage03_engine.config import SchedulerConfig
from stage03_engine.core.block_pool import NULL_BLOCK, BlockPool
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest, FinishReason
from stage03_engine.sampling_params import SamplingParams

EOS = 7
MAX_LEN = 40


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(t % 256 for t in tokens)) % 50


def right_answer(prompt: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
    """What the request yields, by definition."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        output = tokens[len(prompt) :]
        if (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= params.max_tokens or len(tokens) >= MAX_LEN:
            return output, FinishReason.LENGTH


class ToyRunner:
    """Keeps its own picture of every request from the deltas alone, as the model runner does, and checks them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            for known in (self.tokens, self.computed, self.tables):
                known.pop(request_id, None)
        for request_id, blocks in output.new_block_ids.items():
            self.tables[request_id] += blocks
        for new in output.scheduled_new_reqs:
            assert new.request_id not in self.tokens, "a request that the runner knows came as new"
            self.tokens[new.request_id] = list(new.token_ids)
            self.computed[new.request_id] = new.num_computed_tokens
            self.tables[new.request_id] = list(new.block_ids)
        written: set[int] = set()
        sampled = {}
        for request_id, count in output.num_scheduled_tokens.items():
            assert count > 0
            start = self.computed[request_id]
            for position in range(start, start + count):
                slot = (
                    self.tables[request_id][position // self.block_size] * self.block_size + position % self.block_size
                )
                assert slot >= self.block_size, "the null block was written"
                assert slot not in written, "a slot was written twice in a step"
                written.add(slot)
            self.computed[request_id] = start + count
            assert self.computed[request_id] <= len(self.tokens[request_id]), "a token was computed before it existed"
            if self.computed[request_id] == len(self.tokens[request_id]):
                token = next_token(self.tokens[request_id])
                self.tokens[request_id].append(token)
                sampled[request_id] = [token]
        return ModelRunnerOutput(sampled)


def make_request(request_id: str, prompt: list[int], params: SamplingParams) -> Request:
    return Request(EngineCoreRequest(request_id, prompt, params, eos_token_id=EOS), seed=0)


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 49), min_size=1, max_size=MAX_LEN - 1),
        st.integers(1, 30),  # max_tokens
        st.booleans(),  # ignore_eos
        st.lists(st.integers(0, 49), max_size=2),  # stop_token_ids
        st.integers(0, 12),  # arrives at this step
        st.one_of(st.none(), st.integers(1, 25)),  # is aborted at this step
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(
    requests,
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 64))),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(0, 20),
    st.booleans(),
)
def test_every_request_gets_the_right_tokens_once(workload, limits, block_size, spare_blocks, chunked) -> None:
    max_num_seqs, budget = limits
    if not chunked:
        budget = max(budget, MAX_LEN)
    config = SchedulerConfig(max_num_seqs, budget, chunked)
    num_blocks = 1 + -(-MAX_LEN // block_size) + spare_blocks
    scheduler, runner = Scheduler(config, num_blocks, block_size, MAX_LEN), ToyRunner(block_size)
    outputs: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    aborted = set()
    params = {
        f"r{i}": SamplingParams(max_tokens=count, ignore_eos=ignore, stop_token_ids=stops)
        for i, (_, count, ignore, stops, _, _) in enumerate(workload)
    }
    for step in range(2000):
        for i, (prompt, _, _, _, arrival, abort) in enumerate(workload):
            if arrival == step:
                scheduler.add_request(make_request(f"r{i}", prompt, params[f"r{i}"]))
                outputs[f"r{i}"] = []
            if abort == step:
                if f"r{i}" in scheduler.requests:
                    aborted.add(f"r{i}")
                scheduler.finish_requests([f"r{i}", "unknown"])
        decision = scheduler.schedule()
        assert decision.total_num_scheduled_tokens <= budget
        assert len(decision.num_scheduled_tokens) <= max_num_seqs
        assert not decision.num_scheduled_tokens.keys() & set(decision.preempted_req_ids), (
            "sent away and back in one step"
        )
        scheduler.check_invariants()
        if scheduler.has_unfinished_requests:
            assert decision.num_scheduled_tokens, "work is waiting and nothing was scheduled"
        sampled = runner.execute(decision)
        assert runner.tokens.keys() <= scheduler.requests.keys(), "the runner was not told that a request ended"
        for output in scheduler.update_from_output(decision, sampled):
            assert output.request_id not in reasons, "a request spoke after its end"
            outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        scheduler.check_invariants()
        if step > 12 and not scheduler.has_unfinished_requests:
            break
    else:
        pytest.fail("some request never ended")
    assert scheduler.kv_cache_manager.block_pool.num_free == num_blocks - 1, "blocks leaked"
    for i, (prompt, *_) in enumerate(workload):
        expected, reason = right_answer(prompt, params[f"r{i}"])
        if f"r{i}" in aborted:
            assert outputs[f"r{i}"] == expected[: len(outputs[f"r{i}"])]
            assert f"r{i}" not in reasons
        else:
            assert (outputs[f"r{i}"], reasons[f"r{i}"]) == (expected, reason)


def scheduled(scheduler: Scheduler) -> dict[str, int]:
    return scheduler.schedule().num_scheduled_tokens


def test_running_requests_come_before_waiting_ones_and_the_budget_is_shared() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 10, True), 100, 4, MAX_LEN)
    scheduler.add_request(make_request("a", [1] * 14, SamplingParams(max_tokens=5)))
    scheduler.add_request(make_request("b", [2] * 9, SamplingParams(max_tokens=5)))
    assert scheduled(scheduler) == {"a": 10}
    assert scheduled(scheduler) == {"a": 4, "b": 6}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits() -> None:
    scheduler = Scheduler(SchedulerConfig(8, MAX_LEN, False), 100, 4, MAX_LEN)
    scheduler.add_request(make_request("a", [1] * 30, SamplingParams(max_tokens=5)))
    scheduler.add_request(make_request("b", [2] * 20, SamplingParams(max_tokens=5)))
    decision = scheduler.schedule()
    assert decision.num_scheduled_tokens == {"a": 30}
    scheduler.update_from_output(decision, ModelRunnerOutput({"a": [3]}))
    assert scheduled(scheduler) == {"a": 1, "b": 20}


def test_the_last_to_come_is_preempted_first_and_resumes_with_all_its_tokens() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 64, True), 1 + 10, 4, MAX_LEN)
    scheduler.add_request(make_request("a", [1] * 20, SamplingParams(max_tokens=19, ignore_eos=True)))
    scheduler.add_request(make_request("b", [2] * 20, SamplingParams(max_tokens=19, ignore_eos=True)))
    first = scheduler.schedule()
    scheduler.update_from_output(first, ModelRunnerOutput({"a": [3], "b": [4]}))
    second = scheduler.schedule()  # both need a sixth block, none is free
    assert second.preempted_req_ids == ["b"] and second.num_scheduled_tokens == {"a": 1}
    assert [r.request_id for r in scheduler.waiting] == ["b"]
    scheduler.finish_requests(["a"])
    resumed = scheduler.schedule().scheduled_new_reqs[0]
    assert (resumed.request_id, resumed.token_ids, resumed.num_computed_tokens) == ("b", [2] * 20 + [4], 0)


def test_who_is_preempted_is_not_overtaken_by_newcomers() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 64, True), 1 + 10, 4, MAX_LEN)
    for name in "ab":
        scheduler.add_request(make_request(name, [1] * 20, SamplingParams(max_tokens=19, ignore_eos=True)))
    decision = scheduler.schedule()
    scheduler.update_from_output(decision, ModelRunnerOutput({"a": [3], "b": [4]}))
    scheduler.add_request(make_request("small", [5], SamplingParams(max_tokens=2)))
    decision = scheduler.schedule()  # "b" goes; its blocks would be enough for "small", but "b" came first
    assert decision.num_scheduled_tokens == {"a": 1}
    assert [r.request_id for r in scheduler.waiting] == ["b", "small"]


def test_the_same_inputs_give_byte_equal_decisions() -> None:
    import msgspec

    def run() -> bytes:
        scheduler, runner, log = Scheduler(SchedulerConfig(3, 16, True), 20, 4, MAX_LEN), ToyRunner(4), b""
        for i in range(5):
            scheduler.add_request(make_request(f"r{i}", [i] * (5 * i + 1), SamplingParams(max_tokens=9)))
        while scheduler.has_unfinished_requests:
            decision = scheduler.schedule()
            log += msgspec.msgpack.encode(decision)
            scheduler.update_from_output(decision, runner.execute(decision))
        return log

    assert run() == run()


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(), 100, 4, MAX_LEN)
    scheduler.add_request(make_request("a", [1], SamplingParams()))
    with pytest.raises(ValueError, match="already"):
        scheduler.add_request(make_request("a", [1], SamplingParams()))


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 30), st.lists(st.integers(0, 10), max_size=40))
def test_block_pool_loses_nothing(num_blocks: int, actions: list[int]) -> None:
    """Even numbers allocate, odd ones free the oldest allocation."""
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []
    for action in actions:
        if action % 2 and held:
            pool.free(held.pop(0))
        elif action <= pool.num_free:
            held.append(pool.allocate(action))
        else:
            with pytest.raises(ValueError, match="free"):
                pool.allocate(action)
        pool.check_invariants()
        in_use = [block for blocks in held for block in blocks]
        assert NULL_BLOCK not in in_use and len(set(in_use)) == len(in_use)
        assert pool.num_free == num_blocks - 1 - len(in_use)
    with pytest.raises(KeyError):
        pool.free([NULL_BLOCK])
