"""Several engines behind one front end: who gets a request, and what becomes of it when its engine dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import given, strategies as st
from patience import PATIENCE, wait_until
from prometheus_client import CollectorRegistry
from steered_engines import Engines, SteeredEngine, config_of, settle, started, token_at

from stage02_server.api_server import make_core_client
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.admin.end_requests import end_requests
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.args.cpu import find_cores
from stage03_engine.errors import ConfigError, EngineDeadError, EngineStartError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.data_parallel import coordinator as coordinator_module, devices
from stage03_engine.frontend.features.data_parallel.balancing import MOST_BEHIND, Balancer
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient, ScalingError
from stage03_engine.frontend.features.data_parallel.coordinator import CountsLink, DPCoordinator, EngineCounts
from stage03_engine.frontend.features.data_parallel.engine import EngineState, share_of
from stage03_engine.frontend.features.data_parallel.in_flight import LOST, MOST_DEATHS, InFlight
from stage03_engine.frontend.features.data_parallel.prefix_index import PrefixIndex
from stage03_engine.frontend.features.data_parallel.restart import WINDOW_SECONDS, RestartLimit
from stage03_engine.frontend.features.data_parallel.totals import Totals
from stage03_engine.frontend.features.dead_folders.dead_folders import remove_dead_folders
from stage03_engine.frontend.features.prometheus.prometheus import PrometheusStatLogger
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, SchedulerStats, TokenLogprobs
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import read_run

SMALL = {"model": "gpt2-tiny", "kv_cache_memory_bytes": 50_000_000}


def request(name: str, prompt: list[int] | None = None, whole: bool = True, **params: Any) -> EngineCoreRequest:
    kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    return EngineCoreRequest(name, prompt or [1, 2, 3], SamplingParams(**{"max_tokens": 6} | params, output_kind=kind))


class Front:
    """A client over steered engines, and what it passed on."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.engines = Engines()
        self.client = DPLBAsyncMPClient(config_of(size, **settings), self.engines)
        self.sent: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.lost: set[str] = set()
        self.statuses: set[int] = set()  # of their errors
        self.dead: EngineDeadError | None = None
        self.preemptions: dict[int, int] = {}
        self.told: list[dict[str, str]] = []  # to those who watch: what each engine is doing
        self.num_outputs = 0

    async def add(self, made: EngineCoreRequest) -> int:
        """Returns the engine that got it."""
        before = {engine: set(engine.requests) for engine in self.engines.made}
        await self.client.add_request_async(made)
        [engine] = [
            each for each in self.engines.made if made.request_id in set(each.requests) - before.get(each, set())
        ] or [None]
        if engine is not None:
            self.sent[made.request_id] = engine.requests[made.request_id]
        self.tokens[made.request_id] = []
        return -1 if engine is None else engine.index

    async def read(self) -> None:
        while True:
            try:
                outputs = await self.client.get_output_async()
            except EngineDeadError as error:
                self.dead = error
                return
            self.num_outputs += 1
            events = [json.loads(line) for line in outputs.trace_events]
            self.told += [event["args"]["states"] for event in events if event["name"] == "dp.engines"]
            if outputs.scheduler_stats is not None:
                assert outputs.scheduler_stats.num_preemptions >= self.preemptions.get(outputs.engine_index, 0)
                self.preemptions[outputs.engine_index] = outputs.scheduler_stats.num_preemptions
            for output in outputs.outputs:
                assert output.request_id not in self.ended, "something came after the end"
                self.tokens[output.request_id] += output.new_token_ids
                if output.result is not None and LOST in output.result:
                    self.lost.add(output.request_id)
                    self.statuses.add(output.result[LOST])
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output.finish_reason

    def check(self, name: str, complete: bool = True) -> None:
        """Its tokens are the right ones, none twice."""
        made = self.sent[name]
        tokens = [token_at(made, place) for place in range(made.sampling_params.max_tokens or 0)]
        assert self.tokens[name] == (tokens if complete else tokens[: len(self.tokens[name])])


def front(size: int, **settings: Any) -> AbstractAsyncContextManager[Front]:
    return started(Front(size, **settings))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


# Balancing


@given(st.integers(1, 5), st.integers(1, 60))
def test_arrivals_alone_are_spread_evenly(engines: int, arrivals: int) -> None:
    balancer, counts = Balancer(), [0] * engines
    for engine in range(engines):
        balancer.join(engine, 10)
    for _ in range(arrivals):
        choice = balancer.choose(request("r"))
        assert choice is not None
        counts[choice.engine] += 1
    assert max(counts) - min(counts) <= 1


@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 8)), max_size=40))
def test_a_request_goes_to_the_lowest_score(engines: int, seen: list[tuple[int, int, int]]) -> None:
    """Whatever the schedulers say in between. A request that waits counts as four that run."""
    balancer = Balancer()
    for engine in range(engines):
        balancer.join(engine, 10)
    for engine, waiting, running in seen:
        if engine < engines:
            balancer.loads[engine].seen(waiting, running, own=0)
            assert balancer.loads[engine].score == 4 * waiting + running
        scores = {each: load.score for each, load in balancer.loads.items()}
        choice = balancer.choose(request("r"))
        assert choice is not None and scores[choice.engine] == min(scores.values())
        assert balancer.loads[choice.engine].score == min(scores.values()) + 4


def test_what_an_engine_has_not_seen_yet_counts_as_waiting() -> None:
    balancer = Balancer()
    balancer.join(0, 10)
    balancer.join(1, 10)
    for _ in range(6):
        balancer.choose(request("r"))
    balancer.loads[0].seen(waiting=0, running=1, own=3)  # two are still on their way
    assert (balancer.loads[0].waiting, balancer.loads[0].running) == (2, 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=60))
def test_by_prefix_nobody_is_far_behind_the_idlest(sent: list[tuple[int, int]]) -> None:
    balancer = Balancer(PrefixIndex(4))
    for engine in range(3):
        balancer.join(engine, 50)
    for stem, own in sent:
        scores = {each: load.score for each, load in balancer.loads.items()}
        choice = balancer.choose(request("r", [stem] * 12 + [own] * 4))
        assert choice is not None and scores[choice.engine] <= min(scores.values()) + MOST_BEHIND


def test_aborts_and_outputs_belong_to_the_engine_that_has_the_request() -> None:
    async def test() -> None:
        async with front(2) as made:
            places = {name: await made.add(request(name)) for name in "abcd"}
            assert sorted(places.values()) == [0, 0, 1, 1]
            await made.client.abort_requests_async(["b", "c", "nobody"])
            for name in "bc":
                assert name in made.engines[places[name]].aborted and name not in made.engines[1 - places[name]].aborted
            for _ in range(6):
                made.engines[0].step()
                made.engines[1].step()
            await settle()
            assert set(made.ended) == {"a", "d"}
            for name in "ad":
                made.check(name)
            assert made.client._requests == {} and not made.tokens["b"]
            made.engines[places["a"]].requests["a"] = made.sent["a"]  # a late word about a request that is forgotten
            made.engines[places["a"]].places["a"] = 0
            made.engines[places["a"]].step()
            await settle()
            made.check("a")

    run(test)


def test_an_abort_is_counted_for_the_engine_that_had_the_request() -> None:
    """By a client who leaves, and by an administrator."""

    async def test() -> None:
        config, registry = config_of(3), CollectorRegistry()
        client = DPLBAsyncMPClient(config, Engines())
        llm = AsyncLLM.from_vllm_config(
            config, client=client, stat_loggers=[PrometheusStatLogger(config, registry, "m")]
        )
        await llm.start()
        try:
            for name in "abcd":
                made = request(name)
                await llm.add_request(name, made, made.sampling_params)
            places = {name: client.engine_of(name) for name in "abcd"}
            assert sorted(map(str, places.values())) == ["0", "0", "1", "2"] and client.engine_of("nobody") is None
            await llm.abort("c")
            await end_requests(llm, ["d"], "asked")
            counts = {
                index: registry.get_sample_value(
                    "vllm:request_success_total", {"engine": str(index), "model_name": "m", "finished_reason": "abort"}
                )
                for index in range(3)
            }
            assert counts == {index: [places["c"], places["d"]].count(index) for index in range(3)}
            assert counts[2] == 1, "the first engine is not meant"
        finally:
            llm.shutdown()

    run(test)


def test_requests_without_a_seed_get_those_of_one_engine() -> None:
    """In the order of arrival, whichever engine they go to, so that they can run again; and a seed of one's own stays."""

    async def test() -> None:
        async with front(2) as made:
            for name in ("a", "b"):
                await made.add(request(name))
            await made.add(request("own", seed=5))
            engine = random.Random(made.client._config.model_config.seed)
            seeds = [made.sent[name].sampling_params.seed for name in ("a", "b", "own")]
            assert seeds == [engine.getrandbits(63), engine.getrandbits(63), 5]

    run(test)


def test_calls_reach_every_engine() -> None:
    async def test() -> None:
        async with front(3) as made:
            assert await made.client.call("reset_prefix_cache")
            assert [made.engines[i].calls for i in range(3)] == 3 * [["reset_prefix_cache"]]
            made.engines[1].answer = False
            assert not await made.client.call("reset_prefix_cache"), "it is done only if all did it"
            made.engines[1].answer = EngineDeadError("gone")
            assert await made.client.call("reset_prefix_cache"), "a dead one has no cache"
            made.engines[2].answer = InvalidRequestError("no such method")
            with pytest.raises(InvalidRequestError):
                await made.client.call("else")
            for i in range(3):
                made.engines[i].answer = EngineDeadError("gone")
            with pytest.raises(EngineDeadError):
                await made.client.call("reset_prefix_cache")

    run(test)


def test_whoever_watches_sees_every_engine_and_what_becomes_of_it() -> None:
    async def test() -> None:
        async with front(2) as made:
            assert await made.client.call("watch_scheduler")
            assert [made.engines[i].calls for i in range(2)] == 2 * [["watch_scheduler"]]
            made.engines[1].die()
            await until(lambda: made.client.states[1] == EngineState.LOADING)
            assert await made.client.call("watch_scheduler"), "somebody else begins to watch"
            made.engines[1].may_start.set()
            await until(lambda: made.client.num_ready == 2)
            await settle()
            assert made.engines[1].calls == ["watch_scheduler"], "the view goes on"
            await made.client.scale(3)
            await settle()
            assert made.engines[2].calls == ["watch_scheduler"]
            await made.client.scale(2)
            await settle()
            both = {"0": "ready", "1": "ready"}
            assert made.told == [
                both, both | {"1": "dead"}, *2 * [both | {"1": "loading"}], both,
                both | {"2": "loading"}, both | {"2": "ready"}, both | {"2": "draining"}, both,
            ]  # fmt: skip
            assert await made.client.call("unwatch_scheduler")
            made.engines[0].die()
            await until(lambda: made.client.states[0] == EngineState.LOADING)
            made.engines[0].may_start.set()
            await until(lambda: made.client.num_ready == 2)
            await settle()
            assert len(made.told) == 9 and made.engines[0].calls == [], "nobody watches"

    run(test)


def test_whoever_begins_to_watch_while_no_engine_is_ready_sees_them_come() -> None:
    async def test() -> None:
        async with front(2) as made:
            for index in range(2):
                made.engines[index].die()
                await until(lambda index=index: made.client.states[index] == EngineState.LOADING)  # type: ignore[misc]
            assert await made.client.call("watch_scheduler")
            for index in range(2):
                made.engines[index].may_start.set()
            await until(lambda: made.client.num_ready == 2)
            await settle()
            assert made.told[0] == {"0": "loading", "1": "loading"} and made.told[-1] == {"0": "ready", "1": "ready"}
            assert [made.engines[i].calls for i in range(2)] == 2 * [["watch_scheduler"]]

    run(test)


# Faults


def test_only_the_requests_of_the_dead_engine_are_hit() -> None:
    """They run again elsewhere, streams that have begun too; nobody gets a token twice."""

    async def test() -> None:
        async with front(2) as made:
            names = {"whole": True, "whole2": True, "stream": False, "stream2": False, "late": False, "late2": False}
            places = {name: await made.add(request(name, whole=whole)) for name, whole in names.items()}
            for name in ("whole", "whole2", "stream", "stream2"):
                made.engines[places[name]].step(only=name)
            await settle()
            hit = {name for name, place in places.items() if place == 1}
            assert hit == {"whole2", "stream2", "late2"}
            made.engines[1].die()
            await settle()
            assert not made.lost and not made.ended
            assert (
                made.client.states == {0: EngineState.READY, 1: EngineState.LOADING} and made.client.num_restarts == 1
            )
            for _ in range(20):
                made.engines[0].step()
            await settle()
            assert set(made.ended) == set(names)
            for name in names:
                made.check(name)
            dead = next(each for each in made.engines.made if each.index == 1)
            assert dead.is_down, "what it held was released"
            made.engines[1].may_start.set()
            await until(lambda: made.client.num_ready == 2)
            assert await made.add(request("next")) == 0 and await made.add(request("more")) == 1

    run(test)


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_another_engine_continues_differently_is_an_error(whole: bool) -> None:
    """Its beginning may be in the text already. The other engine need not go on."""

    async def test() -> None:
        async with front(2) as made:
            await made.add(request("busy"))
            assert await made.add(request("r", whole=whole)) == 1
            made.engines[1].step()
            await settle()
            made.engines[1].die()
            await settle()
            made.engines[0].step(only="r", changed=True)
            await settle()
            assert made.lost == {"r"} and made.engines[0].aborted == ["r"] and len(made.tokens["r"]) == 1

    run(test)


def test_what_came_with_the_first_token_comes_once() -> None:
    """Prompt logprobs, for instance. What comes with a later token is passed on, also if the engine gives several tokens in a step."""

    def output(tokens: list[int], **more: Any) -> EngineCoreOutput:
        logprobs = [TokenLogprobs([token], [-1.0 * token], 1) for token in tokens]
        return EngineCoreOutput("r", tokens, logprobs, **more)

    first = {"queued_seconds": 1.0, "result": {"prompt_logprobs": [1]}}
    one = InFlight(request("r", whole=False))
    assert one.admit(output([1], **first)) == output([1], **first)
    assert one.admit(output([2, 3])) == output([2, 3])
    one.engine_died()
    assert one.admit(output([1, 2], **first)) is None
    last = {"finish_reason": FinishReason.STOP, "result": {"speech": 1}}
    assert one.admit(output([3, 4, 5], **last)) == output([4, 5], **last)
    short = InFlight(request("r", whole=False))
    short.admit(output([1], **first))
    short.engine_died()
    assert short.admit(output([1, 2], finish_reason=FinishReason.STOP, **first)) == output(
        [2], finish_reason=FinishReason.STOP
    )


def test_a_second_run_that_ends_too_early_differs() -> None:
    one = InFlight(request("r", whole=False))
    one.admit(EngineCoreOutput("r", [5, 6, 7]))
    one.engine_died()
    early = one.admit(EngineCoreOutput("r", [5, 6], finish_reason=FinishReason.LENGTH))
    assert early is not None and early.result == {LOST: 503} and early.finish_reason == FinishReason.ERROR


def test_an_id_that_is_used_again_at_once_is_one_request() -> None:
    """Aborted and asked again while the engine's death is not over: the first one is not sent any more."""

    async def test() -> None:
        async with front(2) as made:
            made.client.grace_seconds = 0.001
            first = await made.add(request("r", whole=False))
            made.engines[first].die()
            while made.client._requests["r"].engine is not None:
                await asyncio.sleep(0)
            await made.client.abort_requests_async(["r"])
            second = await made.add(request("r", whole=False))
            for _ in range(20):
                await asyncio.sleep(0.001)  # the grace time is over after one
            assert second != first and made.client._engines[second].num_requests == 1

    asyncio.run(test())


def test_what_two_engines_died_with_is_not_sent_to_a_third() -> None:
    """One that kills each engine that computes it must not take all with it. What came in between goes on."""

    async def test() -> None:
        async with front(4) as made:
            assert await made.add(request("poison", whole=False)) == 0
            for index in (0, 1):
                assert "poison" in made.engines[index].requests
                made.engines[index].die()
                await settle()
            assert made.lost == {"poison"} and made.ended == {"poison": FinishReason.ERROR} and made.statuses == {500}
            assert not any("poison" in made.engines[index].requests for index in (2, 3))
            assert made.client.num_ready == 2 and made.client._requests == {}
            assert await made.add(request("next")) == 2
            for _ in range(6):
                made.engines[2].step()
            await settle()
            made.check("next")

    run(test)


def test_whoever_waited_while_engines_died_is_no_suspect() -> None:
    async def test() -> None:
        async with front(2) as made:
            for index in (0, 1):
                made.engines[index].die()
            await settle()
            assert await made.add(request("waits")) == -1
            made.engines[0].may_start.set()
            await until(lambda: made.client.num_ready)
            await settle()
            made.engines[0].die()
            await settle()
            assert not made.lost and list(made.client._held) == ["waits"]

    run(test)


def test_requests_wait_while_no_engine_is_ready() -> None:
    async def test() -> None:
        async with front(2) as made:
            for name in ("a", "b"):
                await made.add(request(name))
            for index in (0, 1):
                made.engines[index].die()
            await settle()
            assert made.client.num_ready == 0 and not made.ended
            assert await made.add(request("c")) == -1 and await made.add(request("d")) == -1
            await made.client.abort_requests_async(["b", "d"])
            with pytest.raises(EngineDeadError):
                await made.client.call("reset_prefix_cache")
            made.engines[0].may_start.set()
            await until(lambda: made.client.num_ready)
            await settle()
            assert set(made.engines[0].requests) == {"a", "c"}
            made.sent["c"] = made.engines[0].requests["c"]
            for _ in range(6):
                made.engines[0].step()
            await settle()
            made.check("a")
            made.check("c")

    run(test)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_one_death_too_many_ends_the_server(most: int) -> None:
    """With 0 the first one does, which is vLLM's behaviour."""

    async def test() -> None:
        async with front(2, restart=most) as made:
            for _ in range(most):
                made.engines[1].die()
                await until(lambda: made.client.states[1] == EngineState.LOADING)
                made.engines[1].may_start.set()
                await until(lambda: made.client.num_ready == 2)
            assert made.dead is None
            made.engines[0].die()
            await until(lambda: made.dead)
            with pytest.raises(EngineDeadError, match="killed"):
                await made.client.get_output_async()

    run(test)


@pytest.mark.parametrize(
    "error", ["no memory", OSError(errno.ENOSPC, "no memory"), zmq.ZMQError(errno.ENOSPC, "no memory")]
)
def test_an_engine_that_cannot_start_again_is_tried_as_often_as_allowed(error: str | Exception) -> None:
    async def test() -> None:
        async with front(2, restart=2) as made:
            made.engines.start_errors = [error, error]
            made.engines[1].die()
            while made.dead is None:
                made.engines[1].may_start.set()
                await asyncio.sleep(0)
            assert "no memory" in str(made.dead) and len(made.engines.made) == 4

    run(test)


def test_an_engine_that_stands_still_counts_as_dead() -> None:
    """It owes an answer for too long. One that has nothing to do, or that says anything, does not."""

    async def test() -> None:
        now = 0.0
        async with front(3) as made:
            made.client.clock, made.client.stall_seconds = lambda: now, 10.0
            names = {"alive": True, "stream": False, "gone": True, "alive2": True, "whole": True}
            places = {name: await made.add(request(name, whole=whole)) for name, whole in names.items()}
            assert places == {"alive": 0, "stream": 1, "gone": 2, "alive2": 0, "whole": 1}
            await made.client.abort_requests_async(["gone"])
            made.engines[2].step()
            made.engines[1].step()
            await settle()
            now = 9.0
            made.engines[0].step()
            await settle()
            await made.client.look_for_stalls()
            assert made.client.num_ready == 3
            now = 11.0
            still = made.engines[1]
            await made.client.look_for_stalls()
            await made.client.look_for_stalls()
            still.step()  # it comes back to life, too late
            await settle()
            assert not made.lost and still.was_given_up and still.is_down
            assert made.client.states[1] == EngineState.LOADING and made.client.num_restarts == 1
            for _ in range(6):
                made.engines[0].step()
                made.engines[2].step()
                await settle()
            for name in names:
                made.check(name, complete=name != "gone")
            made.engines[1].may_start.set()
            await until(lambda: made.client.num_ready == 3)

    run(test)


def test_an_engine_that_stands_still_is_left_alone_if_none_is_started_again() -> None:
    async def test() -> None:
        async with front(2, restart=0) as made:
            await made.add(request("a"))
            made.client.clock, made.client.stall_seconds = lambda: 1e9, 10.0
            await made.client.look_for_stalls()
            assert made.client.num_ready == 2 and made.dead is None

    run(test)


def test_restarts_are_counted_within_ten_minutes() -> None:
    now = 0.0
    limit = RestartLimit(2, clock=lambda: now)
    assert limit.take() and limit.take() and not limit.take()
    now = WINDOW_SECONDS - 1
    assert not limit.take()
    now = WINDOW_SECONDS
    assert limit.take() and limit.take() and not limit.take() and limit.total == 4


def test_counters_do_not_go_back_when_an_engine_starts_again() -> None:
    async def test() -> None:
        async with front(2) as made:
            made.engines[1].preemptions = 7
            made.engines[1].step()
            await settle()
            for expected in (8, 9):
                made.engines[1].die()
                await until(lambda: made.client.states[1] == EngineState.LOADING)
                made.engines[1].may_start.set()
                await until(lambda: made.client.num_ready == 2)
                made.engines[1].preemptions = 1
                made.engines[1].step()
                await settle()
                assert made.preemptions[1] == expected

    run(test)


@given(st.randoms(use_true_random=False), st.integers(2, 3))
def test_whatever_dies_no_token_is_wrong_and_none_is_sent_twice(rng: random.Random, size: int) -> None:
    async def test() -> None:
        async with front(size, restart=1000) as made:
            alive: list[str] = []
            deaths: Counter[str] = Counter()  # of the engines that had it
            for number in range(120):
                what = rng.choice(["add", "add", "step", "step", "step", "step", "die", "start", "abort"])
                engine: SteeredEngine = made.engines[rng.randrange(size)]
                if what == "add":
                    name = f"r{number}"
                    await made.add(request(name, [number], whole=rng.random() < 0.5, max_tokens=rng.randint(1, 5)))
                    alive.append(name)
                elif what == "step" and engine.may_start.is_set():
                    engine.step()
                elif what == "die" and made.client.states[engine.index] == EngineState.READY:
                    await settle()  # what it has said arrives
                    deaths.update(list(engine.requests))
                    engine.die()
                    await settle()
                elif what == "start":
                    engine.may_start.set()
                elif what == "abort" and alive:
                    gone = alive.pop(rng.randrange(len(alive)))
                    await made.client.abort_requests_async([gone])
                if rng.random() < 0.7:
                    await settle()
            while set(alive) - set(made.ended):
                for index in range(size):
                    made.engines[index].may_start.set()
                    if made.client.states[index] == EngineState.READY:
                        made.engines[index].step()
                await settle()
            assert made.dead is None and made.client._requests == {} == made.client._held
            assert all(engine.num_requests == 0 for engine in made.client._engines.values())
            for name in set(alive) & set(made.sent):
                made.check(name, complete=name not in made.lost)
            assert made.lost & set(alive) == {name for name in alive if deaths[name] >= MOST_DEATHS}

    run(test)


def test_nothing_grows_with_the_number_of_requests() -> None:
    """Those that end, those that are aborted, and those that lose their engine leave nothing behind."""

    async def test() -> None:
        async with front(2, restart=1000, routing="prefix") as made:
            client, sizes = made.client, set[tuple[int, ...]]()
            for turn in range(300):
                for number in range(8):
                    await made.add(request(f"{turn}-{number}", [turn, number] * 40, number % 2 == 0, max_tokens=2))
                await client.abort_requests_async([f"{turn}-0", f"{turn}-1"])
                if turn % 100 == 50:
                    made.engines.waits = False
                    made.engines[1].die()
                    await until(lambda: client.num_ready == 1)
                    await until(lambda: client.num_ready == 2)
                while client._requests:
                    for index in range(2):
                        made.engines[index].step()
                    await settle()
                index = client._balancer._prefixes
                assert index is not None
                known = [len(blocks) for blocks in index._known.values()]
                sizes.add((len(client._held), len(client._engines), len(client._totals._now) - 2, max(known) <= 100))
                assert len(client._tasks) <= 3 and all(engine.num_requests == 0 for engine in client._engines.values())
            assert sizes == {(0, 2, 0, True)} and made.dead is None

    run(test)


# Scaling


def test_engines_are_added_and_drained() -> None:
    async def test() -> None:
        async with front(2) as made:
            await made.client.scale(4)
            assert set(made.client.states.values()) == {EngineState.READY} and made.client.size == 4
            places = {name: await made.add(request(name)) for name in "abcdefgh"}
            assert sorted(places.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
            made.engines[1].preemptions = 3
            made.engines[1].step()
            await settle()
            scaling = asyncio.create_task(made.client.scale(1))
            await settle()
            assert list(made.client.states.values()) == [EngineState.READY, *3 * [EngineState.DRAINING]]
            assert not scaling.done()
            with pytest.raises(ScalingError, match="already"):
                await made.client.scale(2)
            assert await made.add(request("late")) == 0
            await made.client.abort_requests_async([name for name, place in places.items() if place == 1])
            made.engines[2].die()  # it takes nothing with it: what it had runs elsewhere, and it is not started again
            for _ in range(30):
                made.engines[0].step()
                made.engines[3].step()
                await settle()
            await scaling
            assert made.client.states == {0: EngineState.READY} and made.client.num_restarts == 0
            assert all(made.engines[i].is_down for i in (1, 2, 3))
            for name, place in places.items():
                if place != 1:
                    made.check(name)
            scaling = asyncio.create_task(made.client.scale(2))
            await settle()
            made.engines[1].may_start.set()
            await scaling
            assert made.client.num_ready == 2
            made.engines[1].die()  # before its first output
            await until(lambda: made.client.states[1] == EngineState.LOADING)
            made.engines[1].may_start.set()
            await until(lambda: made.client.num_ready == 2)
            made.engines[1].preemptions = 1
            made.engines[1].step()
            await settle()
            assert made.preemptions[1] == 4, "counters do not go back"

    run(test)


def test_as_many_as_before_if_a_new_engine_cannot_start() -> None:
    async def test() -> None:
        async with front(2) as made:
            made.engines.start_errors = ["no memory"]
            with pytest.raises(EngineStartError, match="no memory"):
                await made.client.scale(4)
            assert made.client.size == 2 and made.client.num_ready == 2 and list(made.client.states) == [0, 1]
            assert all(made.engines[i].is_down for i in (2, 3))
            made.engines[1].die()
            await until(lambda: made.client.num_ready == 1)
            with pytest.raises(ScalingError, match="started again"):
                await made.client.scale(3)

    run(test)


# Who shares what, and who refuses


def test_engines_share_cores_and_memory() -> None:
    config = EngineArgs.from_kwargs(**SMALL, data_parallel_size=2, gpu_memory_utilization=0.8)
    threads = max(1, find_cores().compute // 2)
    assert config.device_config.num_threads == threads
    assert EngineArgs.from_kwargs(**SMALL, data_parallel_size=2, num_threads=3).device_config.num_threads == 3
    alone = EngineArgs.from_kwargs(**SMALL, data_parallel_size=2, data_parallel_rank=1)
    assert alone.device_config.num_threads == find_cores().compute
    engines = Engines()
    client = DPLBAsyncMPClient(config, engines)
    client.start_process()
    assert [each.config.cache_config.gpu_memory_utilization for each in engines.made] == [0.4, 0.4]
    assert [each.config.device_config.num_threads for each in engines.made] == [threads, threads]
    assert share_of(config, 2 * threads * 4).device_config.num_threads == 1
    client.shutdown()


def test_each_engine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of(2)
    config = replace(config, device_config=replace(config.device_config, device="cuda"))
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for place, seen in enumerate("01"):
        with devices.own_devices(config, place):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with (
        pytest.raises(ConfigError, match="3 engines with 1 GPUs each need 3 GPUs, and there are 2"),
        devices.own_devices(config, 2),
    ):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with devices.own_devices(config, 1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


@pytest.mark.parametrize("several", [{"data_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_rank": 1}])
def test_what_has_one_engine_says_so(several: dict[str, int]) -> None:
    for multiprocess in (False, True):
        with pytest.raises(ConfigError, match="LLM has one engine: .* `stages serve`"):
            LLM(**SMALL, **several, multiprocess=multiprocess)
    config = EngineArgs.from_kwargs(**SMALL, **several)
    for args, who in ((FrontendArgs(in_process=True), "--in-process"), (FrontendArgs(engine="echo"), "--engine echo")):
        with pytest.raises(ConfigError, match=f"{who} has one engine"):
            make_core_client(config, args)


# The coordinator


def test_every_front_end_hears_the_counts_of_all(tmp_path: Path) -> None:
    """Also one that comes late; and nothing is left behind."""
    coordinator = DPCoordinator(EngineArgs.from_kwargs(**SMALL, trace=str(tmp_path)))
    process = psutil.Process(coordinator.pid)

    async def test() -> None:
        heard: list[dict[int, tuple[int, int]]] = [{}, {}, {}]
        links = [CountsLink(coordinator.folder) for _ in heard]

        def listen(place: int) -> None:
            links[place].start(
                lambda counts: heard[place].update({each.engine_index: (each.waiting, each.running) for each in counts})
            )

        listen(0)
        listen(1)
        links[0].report(EngineCounts(0, 5, 6))
        links[1].report(EngineCounts(1, 7, 8))
        expected = {0: (5, 6), 1: (7, 8)}
        await _until_timed(lambda: heard[0] == expected and heard[1] == expected)
        listen(2)
        await _until_timed(lambda: heard[2] == expected)
        for garbage in (b"", b"\xc1", b"\x95\x01\x02\x03\xc0" + b"\x91" * 100_000):  # the last one is nested
            links[1]._push.send(garbage)
        links[1].report(EngineCounts(0, 1, 2))
        await _until_timed(lambda: all(each[0] == (1, 2) for each in heard))
        for link in links:
            link.close()

    try:
        run(test)
        assert coordinator.folder.stat().st_mode & 0o777 == 0o700
        remove_dead_folders()  # as the next server that starts does
        assert coordinator.folder.exists()
    finally:
        coordinator.shutdown()
        coordinator.shutdown()
    assert not process.is_running() and not coordinator.folder.exists()
    run_ = read_run(tmp_path)
    published = run_.named("dp.counts_published")
    assert published and {event.proc for event in published} == {"DPCoordinator"}


async def _until_timed(condition: Callable[[], bool]) -> None:
    """Another process has to act: do not take its core."""
    while not condition():
        await asyncio.sleep(0.01)


def test_a_coordinator_that_dies_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the same sockets, as often as it may; the front ends need not do anything."""
    monkeypatch.setattr(coordinator_module, "MOST_RESTARTS", 1)
    coordinator = DPCoordinator(EngineArgs.from_kwargs(**SMALL))

    async def test() -> None:
        heard: dict[int, tuple[int, int]] = {}
        links = [CountsLink(coordinator.folder) for _ in range(2)]
        links[0].start(lambda counts: None)
        links[1].start(
            lambda counts: heard.update({each.engine_index: (each.waiting, each.running) for each in counts})
        )
        links[0].report(EngineCounts(0, 1, 2))
        await _until_timed(lambda: heard == {0: (1, 2)})
        first = coordinator.pid
        os.kill(first, signal.SIGKILL)
        links[0].report(EngineCounts(0, 3, 4))
        await _until_timed(lambda: heard == {0: (3, 4)})
        assert coordinator.pid != first
        os.kill(coordinator.pid, signal.SIGKILL)
        await _until_timed(lambda: "is not started again" in caplog.text)
        for number in range(5000):  # nobody reads them, and nobody waits
            links[0].report(EngineCounts(0, number, 0))
        for link in links:
            link.close()

    try:
        run(test)
    finally:
        coordinator.shutdown()
    assert not coordinator.folder.exists()


def test_a_front_end_beside_others_balances_by_their_counts_too() -> None:
    class Counts:
        def start(self, on_counts: Callable[[list[EngineCounts]], None]) -> None:
            self.publish = on_counts

        def report(self, counts: EngineCounts) -> None:
            reported.append((counts.engine_index, counts.waiting, counts.running))

        def close(self) -> None:
            pass

    reported: list[tuple[int, int, int]] = []

    async def test() -> None:
        engines, counts = Engines(), Counts()
        client = DPLBAsyncMPClient(config_of(2), engines, counts)  # type: ignore[arg-type]
        client.start_process()
        await client.start()
        counts.publish([EngineCounts(0, 3, 4), EngineCounts(1, 0, 4), EngineCounts(9, 0, 0)])
        for name in "abc":
            await client.add_request_async(request(name))
        assert set(engines[1].requests) == {"a", "b", "c"}
        engines[1].step()
        await settle()
        assert reported == [(1, 0, 3)]
        client.shutdown()

    run(test)


def test_the_coordinator_ends_when_its_parent_is_killed() -> None:
    script = """
        import time
        from stage03_engine.arg_utils import EngineArgs
        from stage03_engine.frontend.features.data_parallel.coordinator import DPCoordinator
        coordinator = DPCoordinator(EngineArgs.from_kwargs(model="gpt2-tiny"))
        print(coordinator.pid, coordinator.folder, flush=True)
        input()
    """
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdin=pipe, stdout=pipe, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    pid, folder = parent.stdout.readline().split()
    process = psutil.Process(int(pid))
    wait_until(lambda: (Path(folder) / "counts").exists(), "it does not come up")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    gone, _ = psutil.wait_procs([process], timeout=PATIENCE)
    assert gone and not os.path.exists(folder)


@given(st.lists(st.tuples(st.sampled_from(["step", "end"]), st.sampled_from(["drafts", "hits"]), st.integers(0, 9))))
def test_what_features_count_outlives_an_engine(life: list[tuple[str, str, int]]) -> None:
    """A counter never goes back, also when an engine is started again and counts from 0."""
    totals, stats, expected = Totals(), SchedulerStats(), {"drafts": 0, "hits": 0}
    for what, name, number in life:
        if what == "end":
            stats, told = SchedulerStats(), totals.engine_ended(0)
        else:
            stats.count(**{name: number})
            expected[name] += number
            told = totals.add(0, stats)
        assert {each: told.counts.get(each, 0) for each in expected} == expected
