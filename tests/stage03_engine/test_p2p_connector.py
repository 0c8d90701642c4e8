"""Prompts computed by one engine, and tokens by another: the same tokens as one engine, whatever happens on the way; and no block stays in use."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import shaky_links
from hypothesis import given, settings, strategies as st
from patience import PATIENCE
from small_adapters import write_adapter
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.kv_transfer.connector import KVConnectorHook
from stage03_engine.core.features.p2p_connector import block_server
from stage03_engine.core.features.prefix_cache_reset.prefix_cache_reset import reset_prefix_cache
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check

SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32", "block_size": 4, "linear_backend": "torch",
    "prefix_caching_hash_seed": "one", "check_invariants": True,
}  # fmt: skip
PROMPTS = [list(range(5, 85)), list(range(5, 38)), [7], list(range(5, 20)) + [9] * 20, [8] * 12]
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 3},
    "grammar": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(yes|no){3,6}!")},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3},
}
SECRET = "a secret of the tests"
DO_REMOTE_DECODE = {"do_remote_decode": True}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(first_layers(tmp_path_factory.mktemp("pd") / "model", 2))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET)


def params_of(how: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": how != "grammar"} | HOW[how] | more)


def core_of(model: str, role: str, name: str = "P2pZmqConnector", **more: Any) -> EngineCore:
    extra = {"max_read_seconds": 3600, "hold_seconds": 3600} | more.pop("extra", {})
    given_config = {"kv_connector": name, "kv_role": role, "kv_port": 0, "kv_connector_extra_config": extra}
    if name != "P2pZmqConnector":
        given_config["kv_connector_module_path"] = "shaky_links"
    return EngineCore(EngineArgs.from_kwargs(model=model, **SMALL | more, kv_transfer_config=given_config))


class Pair:
    """A producer and a consumer in this process, and what a router does between them."""

    def __init__(self, model: str, name: str = "P2pZmqConnector", **more: Any) -> None:
        self.producer, self.consumer = (core_of(model, role, name, **more) for role in ("kv_producer", "kv_consumer"))
        self._waiting: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.cached: dict[str, int] = {}
        self.ended: set[str] = set()

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        name = f"r{next(_numbers)}"
        self.tokens[name], self.logprobs[name] = [], []
        self._waiting[name] = EngineCoreRequest(name, prompt, params)
        first = msgspec.structs.replace(
            params, max_tokens=1, structured_outputs=None, kv_transfer_params=DO_REMOTE_DECODE
        )
        self.producer.add_request(EngineCoreRequest(name, prompt, first))
        return name

    def step(self) -> None:
        if self.producer.has_unfinished_requests:
            for output in self.producer.step().outputs:
                if output.finish_reason is not None:
                    self.go_on(output)
        if self.consumer.has_unfinished_requests:
            for output in self.consumer.step().outputs:
                self.tokens[output.request_id] += output.new_token_ids
                self.logprobs[output.request_id] += [each.logprobs[0] for each in output.new_logprobs or []]
                self.cached.setdefault(output.request_id, output.num_cached_tokens)
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)

    def go_on(self, output: EngineCoreOutput) -> None:
        """With the rest of the request, at the consumer."""
        rest = self._waiting.pop(output.request_id, None)
        if rest is not None:
            where = (output.result or {}).get("kv_transfer_params")
            params = msgspec.structs.replace(rest.sampling_params, kv_transfer_params=where)
            self.consumer.add_request(msgspec.structs.replace(rest, sampling_params=params))

    def run(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end
            self.step()

    def ask(self, mix: list[tuple[str, int]]) -> list[list[int]]:
        names = [self.add(PROMPTS[number], params_of(how)) for how, number in mix]
        self.run(lambda: self.ended >= set(names))
        return [self.tokens[name] for name in names]

    def abort(self, name: str) -> None:
        """As the client of the engines does, wherever it is."""
        self._waiting.pop(name, None)
        self.producer.abort_requests([name])
        self.consumer.abort_requests([name])

    def assert_all_free(self) -> None:
        self.run(lambda: not self.producer.has_unfinished_requests and not self.consumer.has_unfinished_requests)
        for core in (self.producer, self.consumer):
            pool = core.scheduler.kv_cache_manager.block_pool
            assert pool.num_free == pool.num_usable and not any(hook.held_blocks for hook in core.scheduler.hooks)
            for hook in core.scheduler.hooks:
                hook.check_invariants()

    def forget(self) -> None:
        assert all(reset_prefix_cache(core) for core in (self.producer, self.consumer))

    def close(self) -> None:
        self.producer.shutdown()
        self.consumer.shutdown()


@pytest.fixture
def pair(model: str) -> Iterator[Pair]:
    made = Pair(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(model: str) -> dict[tuple[str, int], list[int]]:
    """One engine, one request at a time, no prefix cache."""
    with LLM(model, **SMALL | {"enable_prefix_caching": False}) as llm:
        asked = [(how, n) for how in HOW for n in range(len(PROMPTS))]
        return {
            each: list(llm.generate([PROMPTS[each[1]]], params_of(each[0]))[0].outputs[0].token_ids) for each in asked
        }


# Tokens

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 96, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 33, "max_num_seqs": 16, "max_num_batched_tokens": 24},
    "swapped": {"num_gpu_blocks_override": 33, "preemption_mode": "swap", "swap_space": 0.001},
    "fair": {"scheduling_policy": "fair"},
}
mixes = st.lists(st.tuples(st.sampled_from(sorted(HOW)), st.integers(0, len(PROMPTS) - 1)), min_size=1, max_size=7)


@pytest.mark.slow(keep="preempted")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_engines_give_the_tokens_of_one(name: str, model: str, alone: dict[tuple[str, int], list[int]]) -> None:
    pair = Pair(model, **CONFIGURATIONS[name])

    @settings(max_examples=8)
    @given(mixes, st.booleans())
    def serve(mix: list[tuple[str, int]], forget: bool) -> None:
        assert pair.ask(mix) == [alone[each] for each in mix]
        pair.assert_all_free()
        if forget:
            pair.forget()

    try:
        serve()
        everything = [(how, number) for how in ("greedy", "seeded") for number in (0, 1, 3, 0, 1, 3)]
        assert pair.ask(everything) == [alone[each] for each in everything]
        pair.assert_all_free()
        preempted = [core.scheduler.stats.num_preemptions for core in (pair.producer, pair.consumer)]
        assert any(preempted) or name != "preempted"
    finally:
        pair.close()


@pytest.mark.slow(keep="preempted")
@pytest.mark.parametrize("name", ["plain", "preempted"])
def test_a_shaky_link_changes_no_token(name: str, model: str, alone: dict[tuple[str, int], list[int]]) -> None:
    """Each block, question and end may be lost, late, torn, twice, or another's; now and then a request is aborted on its way."""
    extra = {"max_read_seconds": 0.05, "hold_seconds": 0.2}
    pair = Pair(model, "Shaky", extra=extra, **CONFIGURATIONS[name])
    shaky_links.seen.clear()
    shaky_links.fates[:] = shaky_links.ALL

    @settings(max_examples=settings().max_examples // 3)
    @given(mixes, st.integers(0, 999), st.integers(0, 12))
    def serve(mix: list[tuple[str, int]], seed: int, leaving: int) -> None:
        shaky_links.rng.seed(seed)
        gone = pair.add(PROMPTS[seed % 2], params_of("greedy"))
        for _ in range(leaving):
            pair.step()
        if seed % 2:
            pair.abort(gone)
        assert pair.ask(mix) == [alone[each] for each in mix]
        pair.assert_all_free()
        pair.forget()

    try:
        serve()
        for seed in range(20):  # whatever was drawn
            shaky_links.rng.seed(seed)
            assert pair.ask([("greedy", 0)]) == [alone["greedy", 0]]
            pair.assert_all_free()
            pair.forget()
    finally:
        shaky_links.fates[:] = ["arrives"]
        pair.close()
    missing = {f"Block {fate}" for fate in shaky_links.ALL} - shaky_links.seen
    assert not missing, f"these never happened: {missing}"
    assert {"Want is lost", "End is lost", "Done is lost"} & shaky_links.seen


def test_all_full_blocks_before_the_last_token_travel(pair: Pair, alone: dict[tuple[str, int], list[int]]) -> None:
    """Also those that the producer had in its cache; a consumer that has them asks for nothing."""
    for cached, forgets in ((76, "consumer"), (76, "nobody"), (76, "producer"), (76, "both")):
        assert pair.ask([("greedy", 0)]) == [alone["greedy", 0]]
        assert pair.cached[f"r{max(int(name[1:]) for name in pair.ended)}"] == cached, forgets
        pair.assert_all_free()
        for name, core in (("producer", pair.producer), ("consumer", pair.consumer)):
            assert forgets not in (name, "both") or reset_prefix_cache(core)
    stats = pair.consumer.scheduler.make_stats().counts
    assert stats["external_prefix_cache_hits"] == 2 * 76, "it fetched what it had, or computed what it could have"


def test_requests_with_one_beginning_share_its_blocks(pair: Pair, alone: dict[tuple[str, int], list[int]]) -> None:
    """The producer keeps such a block once for each, and lets it go when all have it."""
    names = [pair.add(PROMPTS[0], params_of("greedy")) for _ in range(3)]
    pair.run(lambda: not pair.producer.scheduler.requests)
    [hook] = [hook for hook in pair.producer.scheduler.hooks if isinstance(hook, KVConnectorHook)]
    pair.run(lambda: pair.ended >= set(names))
    assert [pair.tokens[name] for name in names] == [alone["greedy", 0]] * 3
    pair.assert_all_free()
    assert not hook.held_blocks


def test_logprobs_are_those_of_one_engine(pair: Pair, model: str) -> None:
    with LLM(model, **SMALL) as llm:
        [output] = llm.generate([PROMPTS[0]], params_of("logprobs"))
    places = output.outputs[0].logprobs
    assert places is not None
    name = pair.add(PROMPTS[0], params_of("logprobs"))
    pair.run(lambda: name in pair.ended)
    assert pair.logprobs[name] == pytest.approx([place.logprobs[0] for place in places], abs=1e-4)


def test_what_an_adapter_changed_travels_too(model: str, tmp_path: Path) -> None:
    """The blocks' hashes stand for its files."""
    adapter = write_adapter(tmp_path / "a", Path(model), seed=1)
    flags: dict[str, Any] = {"enable_lora": True, "lora_modules": (f"a={adapter}",)}
    with LLM(model, **SMALL, **flags) as llm:
        expected = [
            list(llm.generate([PROMPTS[0]], params_of("greedy", lora=lora))[0].outputs[0].token_ids)
            for lora in (None, "a")
        ]
    assert expected[0] != expected[1]
    pair = Pair(model, **flags)
    try:
        names = [
            pair.add(PROMPTS[0], params_of("greedy", lora=lora, lora_int_id=int(lora is not None)))
            for lora in (None, "a")
        ]
        pair.run(lambda: pair.ended >= set(names))
        assert [pair.tokens[name] for name in names] == expected
        assert [pair.cached[name] for name in names] == [76, 76]
        pair.assert_all_free()
    finally:
        pair.close()


# What ends on the way


def test_a_request_that_is_aborted_keeps_no_block(model: str) -> None:
    """While its prompt is computed, chunk by chunk, between the two engines, while its blocks come, and while it runs."""
    pair = Pair(model, max_num_batched_tokens=16, max_num_seqs=4)
    try:
        for steps in range(14):
            name = pair.add(PROMPTS[0], params_of("greedy"))
            for _ in range(steps):
                pair.step()
            pair.abort(name)
            pair.assert_all_free()
            pair.forget()
    finally:
        pair.close()


def test_blocks_that_nobody_asks_for_are_given_up(model: str) -> None:
    """After `hold_seconds`, or when the router says so."""
    for hold, release in ((0.05, False), (3600, True)):
        core = core_of(model, "kv_producer", extra={"hold_seconds": hold})
        try:
            core.add_request(
                EngineCoreRequest(
                    "a", PROMPTS[0], params_of("greedy", max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
                )
            )
            [output] = [output for output in steps_until_output(core) if output.finish_reason is not None]
            params = (output.result or {})["kv_transfer_params"]
            pool = core.scheduler.kv_cache_manager.block_pool
            assert pool.num_free < pool.num_usable or not release
            if release:
                assert core.call("release_kv_blocks", [params["remote_request_id"]])
            end = time.monotonic() + PATIENCE / 2
            while core.has_unfinished_requests:
                assert time.monotonic() < end
                core.step()
            assert pool.num_free == pool.num_usable
        finally:
            core.shutdown()


def steps_until_output(core: EngineCore) -> list[EngineCoreOutput]:
    while not (outputs := core.step().outputs):
        pass
    return outputs


def test_blocks_of_a_prompt_that_is_being_computed_stay(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the rest of it takes: `hold_seconds` is for those who ask, and nobody can ask yet."""
    now, pair = itertools.count(step=10_000), Pair(model, max_num_batched_tokens=16, max_num_seqs=4)
    try:
        name = pair.add(PROMPTS[0], params_of("greedy"))
        with monkeypatch.context() as clock:
            clock.setattr(block_server, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
            [output] = steps_until_output(pair.producer)
        pair.go_on(output)
        pair.run(lambda: name in pair.ended)
        assert pair.cached[name] == 76, "blocks of its first chunks were given up"
        pair.assert_all_free()
    finally:
        pair.close()


def test_a_producer_that_dies_costs_nothing_but_time(model: str, alone: dict[tuple[str, int], list[int]]) -> None:
    """Before it was asked, and when it cannot be reached any more."""
    pair = Pair(model, extra={"max_read_seconds": 5.0})
    try:
        assert pair.ask([("greedy", 1)]) == [alone["greedy", 1]]  # the link is there
        names = [pair.add(PROMPTS[0], params_of("greedy")), pair.add(PROMPTS[3], params_of("seeded"))]
        while not pair.consumer.scheduler.requests:  # its blocks are being asked for
            pair.step()
        pair.producer.shutdown()
        pair.producer.scheduler.requests.clear()
        for waiting in list(pair._waiting):
            pair.go_on(EngineCoreOutput(waiting, []))
        consumer = pair.consumer
        end = time.monotonic() + PATIENCE
        while not pair.ended >= set(names):
            assert time.monotonic() < end
            for output in consumer.step().outputs:
                pair.tokens[output.request_id] += output.new_token_ids
                pair.ended |= {output.request_id} if output.finish_reason is not None else set()
        assert [pair.tokens[name] for name in names] == [alone["greedy", 0], alone["seeded", 3]]
        pool = consumer.scheduler.kv_cache_manager.block_pool
        assert pool.num_free == pool.num_usable
    finally:
        pair.consumer.shutdown()


@pytest.mark.parametrize(
    "other",
    [{"block_size": 8}, {"dtype": "bfloat16"}, {"model": "gpt2-tiny"}, {"prefix_caching_hash_seed": "two"}],
    ids=str,
)
def test_blocks_of_another_engine_are_not_used(
    other: dict[str, Any], model: str, alone: dict[tuple[str, int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so."""
    producer = core_of(other.pop("model", model), "kv_producer", **other)
    consumer = core_of(model, "kv_consumer")
    try:
        for again in range(2):
            name = f"{again}"
            first = params_of("greedy", max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
            producer.add_request(EngineCoreRequest(name, PROMPTS[again], first))
            [output] = steps_until_output(producer)
            where = (output.result or {})["kv_transfer_params"]
            consumer.add_request(EngineCoreRequest(name, PROMPTS[again], params_of("greedy", kv_transfer_params=where)))
            tokens, cached = list[int](), 0
            while consumer.has_unfinished_requests:
                for output in consumer.step().outputs:
                    tokens, cached = tokens + output.new_token_ids, output.num_cached_tokens
            assert tokens == alone["greedy", again]
            assert cached <= 32 * again  # the first prompt begins like the second, and is cached here
        end = time.monotonic() + PATIENCE
        while producer.has_unfinished_requests:
            assert time.monotonic() < end
            producer.step()
    finally:
        producer.shutdown()
        consumer.shutdown()
    said = [record.message for record in caplog.records if "is used: 'it is of another model" in record.message]
    assert len(said) == ("prefix_caching_hash_seed" not in other)


# In the trace


def test_a_recording_shows_each_block_on_its_way(model: str, tmp_path: Path) -> None:
    """What was received names what was sent, that the question, and what was let go the last of them. A replay decides the same."""
    with LLM(model, trace=str(tmp_path), **SMALL):
        pair = Pair(model)
        try:
            pair.ask([("greedy", 0), ("greedy", 3)])
            pair.assert_all_free()
        finally:
            pair.close()
    run = read_run(tmp_path)
    asked, sent, received = (run.named(f"kv_p2p.{name}") for name in ("asked", "sent", "received"))
    assert [event.cause for event in sent] == [event.ref for event in asked]
    assert [event.cause for event in received] == [event.ref for event in sent]
    assert {event.cause for event in run.named("kv_p2p.released")} <= {event.ref for event in received}
    assert [event.args["num_blocks"] for event in sent if event.req == sent[0].req] == [16, 3]
    assert not [str(finding) for finding in check(tmp_path).findings if "kv_p2p" in str(finding)]


def test_of_the_next_turn_only_new_blocks_travel(model: str, tmp_path: Path) -> None:
    """The consumer has the turn before, its own answer included, and asks for what comes after it."""
    with LLM(model, trace=str(tmp_path), **SMALL):
        pair = Pair(model)
        try:
            prompt = PROMPTS[1]
            for _ in range(2):
                name = pair.add(prompt, params_of("greedy"))
                pair.run(lambda: name in pair.ended)  # noqa: B023
                prompt = prompt + pair.tokens[name] + [9] * 10
            pair.assert_all_free()
        finally:
            pair.close()
    asked = [(event.args["first"], event.args["num_blocks"]) for event in read_run(tmp_path).named("kv_p2p.asked")]
    assert asked == [(0, 8), (11, 2)]  # of 33 tokens, and of 33 + 12 + 10: 44 of the first 45 were computed


def test_a_producer_needs_a_secret(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGES_NODE_SECRET")
    with pytest.raises(ConfigError, match="need a shared secret"):
        core_of(model, "kv_producer")
