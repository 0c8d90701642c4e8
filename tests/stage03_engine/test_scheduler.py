"""The scheduler against a toy model: no tensors, no clock, milliseconds.

The toy (toy_runner.py) knows the right output of every request without any scheduler, and keeps a KV cache in which every
slot says for which prefix it was computed. So any mistake in chunking, preemption, prefix caching or bookkeeping shows.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st
from toy_runner import MAX_LEN, ToyRunner, make_request, make_scheduler, right_answer

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset
from stage03_engine.core.features.scheduler_watch.scheduler_watch import cached_blocks
from stage03_engine.core.features.swap_space.swap_space import SWAPS, Swaps
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import FinishReason
from stage03_engine.sampling_params import SamplingParams

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


@given(
    requests,
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 64))),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 3, 50]),
)
def test_every_request_gets_the_right_tokens_once(
    workload, limits, block_size, spare_blocks, chunked, caching, swap_blocks
) -> None:
    max_num_seqs, budget = limits
    if not chunked:
        budget = max(budget, MAX_LEN)
    num_blocks = 1 + -(-MAX_LEN // block_size) + spare_blocks
    scheduler = make_scheduler(
        max_num_seqs,
        budget,
        num_blocks,
        block_size,
        caching=caching,
        swap_blocks=swap_blocks,
        enable_chunked_prefill=chunked,
    )
    runner = ToyRunner(scheduler)
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
        check_invariants(scheduler)
        if scheduler.has_unfinished_requests:
            assert decision.num_scheduled_tokens, "work is waiting and nothing was scheduled"
        sampled = runner.execute(decision)
        assert runner.tokens.keys() <= scheduler.requests.keys(), "the runner was not told that a request ended"
        for output in scheduler.update_from_output(decision, sampled):
            assert output.request_id not in reasons, "a request spoke after its end"
            outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        check_invariants(scheduler)
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
    scheduler = make_scheduler(8, 10, 100)
    scheduler.add_request(make_request("a", [1] * 14, SamplingParams(max_tokens=5)))
    scheduler.add_request(make_request("b", [2] * 9, SamplingParams(max_tokens=5)))
    assert scheduled(scheduler) == {"a": 10}
    assert scheduled(scheduler) == {"a": 4, "b": 6}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits() -> None:
    scheduler = make_scheduler(8, MAX_LEN, 100, enable_chunked_prefill=False)
    scheduler.add_request(make_request("a", [1] * 30, SamplingParams(max_tokens=5)))
    scheduler.add_request(make_request("b", [2] * 20, SamplingParams(max_tokens=5)))
    decision = scheduler.schedule()
    assert decision.num_scheduled_tokens == {"a": 30}
    scheduler.update_from_output(decision, ModelRunnerOutput({"a": [3]}))
    assert scheduled(scheduler) == {"a": 1, "b": 20}


def test_without_chunked_prefill_what_is_missing_may_be_all_of_the_budget() -> None:
    for missing, budget, expected in ((9, 10, {"a": 9}), (10, 10, {"a": 10}), (11, 10, {})):
        scheduler = make_scheduler(8, budget, 100, enable_chunked_prefill=False)
        scheduler.add_request(make_request("a", [1] * missing, SamplingParams(max_tokens=5)))
        assert scheduled(scheduler) == expected, (missing, budget)


def test_the_last_to_come_is_preempted_first_and_resumes_with_all_its_tokens() -> None:
    scheduler = make_scheduler(8, 64, 1 + 10)
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
    scheduler = make_scheduler(8, 64, 1 + 10)
    for name in "ab":
        scheduler.add_request(make_request(name, [1] * 20, SamplingParams(max_tokens=19, ignore_eos=True)))
    decision = scheduler.schedule()
    scheduler.update_from_output(decision, ModelRunnerOutput({"a": [3], "b": [4]}))
    scheduler.add_request(make_request("small", [5], SamplingParams(max_tokens=2)))
    decision = scheduler.schedule()  # "b" goes; its blocks would be enough for "small", but "b" came first
    assert decision.num_scheduled_tokens == {"a": 1}
    assert [r.request_id for r in scheduler.waiting] == ["b", "small"]


class Holding(SchedulerHook):
    """Holds back all that was not released, and counts how often it is asked."""

    asked = 0

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, VllmConfig())
        self.kept: set[str] = set()
        self.next: list[str] = []

    def added(self, request: Request) -> None:
        self.kept.add(request.request_id)

    def holds(self, request: Request) -> bool:
        self.asked += 1
        return request.request_id in self.kept

    def release(self, name: str) -> None:
        self.kept.remove(name)
        self.next.append(name)

    def released(self) -> list[str]:
        released, self.next = self.next, []
        return released


def test_a_step_does_not_look_at_requests_that_hooks_hold_back() -> None:
    scheduler = make_scheduler(8, 64, 1 + 40)
    first, second = Holding(scheduler), Holding(scheduler)
    scheduler.hooks = [first, second]
    names = [f"r{number}" for number in range(1000)]
    for name in names:
        scheduler.add_request(make_request(name, [1] * 20, SamplingParams(max_tokens=2)))
    for _ in range(10):
        assert not scheduler.schedule().num_scheduled_tokens
    assert first.asked == len(names) and len(scheduler.held) == scheduler.make_stats().num_waiting == len(names)
    check_invariants(scheduler)
    for hook, releases in ((first, "r7"), (first, "r3"), (second, "r7")):  # what both have released runs
        assert not scheduler.schedule().num_scheduled_tokens
        hook.release(releases)
    assert scheduled(scheduler) == {"r7": 20}
    second.release("r3")
    assert scheduled(scheduler) == {"r3": 20}  # nothing has been sampled, so r7 has no next token
    scheduler.finish_requests(names)
    check_invariants(scheduler)
    assert not scheduler.held and not scheduler.has_unfinished_requests


def test_the_same_inputs_give_byte_equal_decisions() -> None:
    def run() -> bytes:
        scheduler, log = make_scheduler(3, 16, 20, caching=True), b""
        runner = ToyRunner(scheduler)
        for i in range(5):
            scheduler.add_request(make_request(f"r{i}", [i] * (5 * i + 1), SamplingParams(max_tokens=9)))
        while scheduler.has_unfinished_requests:
            decision = scheduler.schedule()
            log += msgspec.msgpack.encode(decision)
            scheduler.update_from_output(decision, runner.execute(decision))
        return log

    assert run() == run()


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler(8, 64, 100)
    scheduler.add_request(make_request("a", [1], SamplingParams()))
    with pytest.raises(ValueError, match="already"):
        scheduler.add_request(make_request("a", [1], SamplingParams()))


def step(scheduler: Scheduler, runner: ToyRunner) -> list[str]:
    """One step; returns who got tokens."""
    decision = scheduler.schedule()
    scheduler.update_from_output(decision, runner.execute(decision))
    check_invariants(scheduler)
    return list(decision.num_scheduled_tokens)


def test_a_long_prefill_leaves_room_for_others_but_not_when_it_is_alone() -> None:
    """800-token prompts, a budget of 1,024 and a threshold of 400: 400, 400 and the 224 that are left."""
    scheduler = make_scheduler(8, 1024, 1000, long_prefill_token_threshold=400)
    for name in "abc":
        scheduler.add_request(make_request(name, [1] * 800, SamplingParams(max_tokens=5)))
    assert scheduled(scheduler) == {"a": 400, "b": 400, "c": 224}
    alone = make_scheduler(8, 1024, 1000, long_prefill_token_threshold=400)
    alone.add_request(make_request("a", [1] * 800, SamplingParams(max_tokens=5)))
    assert scheduled(alone) == {"a": 800}


def test_priority_decides_who_waits_and_who_is_preempted() -> None:
    scheduler = make_scheduler(1, 64, 100, scheduling_policy="priority")
    for name, priority in (("late", 5), ("first", 1), ("second", 1), ("urgent", -3)):
        scheduler.add_request(make_request(name, [1] * 5, SamplingParams(max_tokens=1), priority))
    runner, order = ToyRunner(scheduler), []
    while scheduler.has_unfinished_requests:
        order += step(scheduler, runner)
    assert order == ["urgent", "first", "second", "late"]  # arrival breaks the tie

    scheduler = make_scheduler(8, 64, 1 + 10, scheduling_policy="priority")
    scheduler.add_request(make_request("low", [1] * 20, SamplingParams(max_tokens=19, ignore_eos=True), 9))
    scheduler.add_request(make_request("high", [2] * 20, SamplingParams(max_tokens=19, ignore_eos=True), 0))
    decision = scheduler.schedule()
    scheduler.update_from_output(decision, ModelRunnerOutput({"low": [3], "high": [4]}))
    decision = scheduler.schedule()
    assert decision.preempted_req_ids == ["low"] and decision.num_scheduled_tokens == {"high": 1}


def test_a_prefix_hit_takes_full_blocks_and_never_the_last_token() -> None:
    scheduler = make_scheduler(8, 64, 100, caching=True)
    runner = ToyRunner(scheduler)
    prompt = list(range(10, 22))  # three full blocks
    scheduler.add_request(make_request("a", prompt, SamplingParams(max_tokens=1)))
    step(scheduler, runner)
    for name, tokens, cached in (("same", prompt, 8), ("longer", [*prompt, 1], 12), ("other", [9, *prompt[1:]], 0)):
        scheduler.add_request(make_request(name, tokens, SamplingParams(max_tokens=1)))
        decision = scheduler.schedule()
        [new] = decision.scheduled_new_reqs
        assert (new.num_computed_tokens, decision.num_scheduled_tokens[name]) == (cached, len(tokens) - cached)
        [output] = scheduler.update_from_output(decision, runner.execute(decision))
        assert output.num_cached_tokens == cached
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (12 + 12 + 13 + 12, 8 + 12)


def test_requests_of_one_step_share_their_prompt() -> None:
    """Parallel sampling: the second copy finds the blocks that the first one fills in the very same step."""
    scheduler = make_scheduler(8, 64, 100, caching=True)
    runner = ToyRunner(scheduler)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, list(range(10, 23)), SamplingParams(max_tokens=3)))
    decision = scheduler.schedule()
    first, second = decision.scheduled_new_reqs
    assert first.block_ids[:3] == second.block_ids[:3] and first.block_ids[3] != second.block_ids[3]
    assert decision.num_scheduled_tokens == {"a": 13, "b": 1}
    scheduler.update_from_output(decision, runner.execute(decision))
    while scheduler.has_unfinished_requests:
        step(scheduler, runner)


def test_salts_do_not_share_and_equal_salts_do() -> None:
    scheduler = make_scheduler(8, 64, 100, caching=True)
    runner, computed = ToyRunner(scheduler), {}
    for name, salt in (
        ("plain", None),
        ("tenant", "s1"),
        ("other", "s2"),
        ("tenant again", "s1"),
        ("plain again", None),
    ):
        runner.salts[name] = salt
        scheduler.add_request(make_request(name, [5] * 9, SamplingParams(max_tokens=1), cache_salt=salt))
        decision = scheduler.schedule()
        computed[name] = decision.scheduled_new_reqs[0].num_computed_tokens
        scheduler.update_from_output(decision, runner.execute(decision))
    assert computed == {"plain": 0, "tenant": 0, "other": 0, "tenant again": 8, "plain again": 8}


def test_the_cache_is_reset_only_while_nothing_runs() -> None:
    scheduler = make_scheduler(8, 64, 100, caching=True)
    runner = ToyRunner(scheduler)
    scheduler.add_request(make_request("a", [5] * 9, SamplingParams(max_tokens=2, ignore_eos=True)))
    step(scheduler, runner)
    assert not reset(scheduler)
    step(scheduler, runner)
    assert len(cached_blocks(scheduler.kv_cache_manager.block_pool)) == 2
    assert reset(scheduler)
    assert len(cached_blocks(scheduler.kv_cache_manager.block_pool)) == 0
    scheduler.add_request(make_request("a", [5] * 9, SamplingParams(max_tokens=1)))
    decision = scheduler.schedule()
    assert decision.scheduled_new_reqs[0].num_computed_tokens == 0
    scheduler.update_from_output(decision, runner.execute(decision))
    assert len(cached_blocks(scheduler.kv_cache_manager.block_pool)) == 2, (
        "a second request of the same name is cached as the first"
    )


@pytest.mark.parametrize("how", ["prefix cache", "swap"])
def test_who_resumes_does_not_compute_everything_again(how: str) -> None:
    options = {"caching": True} if how == "prefix cache" else {"swap_blocks": 20}
    scheduler = make_scheduler(8, 64, 1 + 10, **options)
    runner = ToyRunner(scheduler)
    for name, token in (("a", 1), ("b", 2)):
        scheduler.add_request(make_request(name, [token] * 18, SamplingParams(max_tokens=15, ignore_eos=True)))
    while not scheduler.make_stats().num_preemptions:
        step(scheduler, runner)
    scheduler.finish_requests(["a"])
    resumed = scheduler.schedule().scheduled_new_reqs[0]
    assert resumed.request_id == "b"
    if how == "swap":
        assert resumed.num_computed_tokens == len(resumed.token_ids) - 1
    else:
        assert resumed.num_computed_tokens >= 16


def test_every_output_says_how_often_its_request_was_preempted() -> None:
    scheduler = make_scheduler(8, 64, 1 + 10)
    runner = ToyRunner(scheduler)
    for name, token in (("a", 1), ("b", 2)):
        scheduler.add_request(make_request(name, [token] * 18, SamplingParams(max_tokens=15, ignore_eos=True)))
    told: dict[str, list[int]] = {"a": [], "b": []}
    while scheduler.has_unfinished_requests:
        decision = scheduler.schedule()
        for output in scheduler.update_from_output(decision, runner.execute(decision)):
            told[output.request_id].append(output.num_preemptions)
    assert told["a"] == [0] * 15 and len(told["b"]) == 15
    assert told["b"] == sorted(told["b"]) and told["b"][0] == 0 and told["b"][-1] == scheduler.stats.num_preemptions > 0


def test_what_is_still_cached_is_not_swapped_back_over() -> None:
    scheduler = make_scheduler(8, 64, 1 + 10, caching=True, swap_blocks=20)
    runner = ToyRunner(scheduler)
    for name, token in (("a", 1), ("b", 2)):
        scheduler.add_request(make_request(name, [token] * 18, SamplingParams(max_tokens=15, ignore_eos=True)))
    while not scheduler.make_stats().num_preemptions:
        step(scheduler, runner)
    scheduler.finish_requests(["a"])
    decision = scheduler.schedule()
    resumed = decision.scheduled_new_reqs[0]
    assert resumed.num_computed_tokens == len(resumed.token_ids) - 1
    assert len((SWAPS.of(decision.extras) or Swaps()).back) <= 1, (
        "only the last block was not full, and so not to be found"
    )


def test_hash_chains_differ_between_engines_unless_a_seed_is_set() -> None:
    from stage03_engine.core.block_pool import BlockPool
    from stage03_engine.core.kv_cache_manager import KVCacheManager

    def first_hash(seed: bytes) -> bytes:
        request = make_request("a", [1] * 9, SamplingParams())
        KVCacheManager(BlockPool(10), 4, True, seed).get_computed_blocks(request)
        assert len(set(request.block_hashes)) == 2, "the same tokens at another place have another hash"
        return request.block_hashes[0]

    assert first_hash(b"x") == first_hash(b"x") != first_hash(b"y")
