"""`--data-parallel-routing prefix`: does the client know what its engines have cached, and does it go by that?

The engines are real schedulers with real caches and without a model: the simulation of exercise 18.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from routing_simulation import simulation
from steered_engines import Engines, config_of, token_at

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.features.kv_transfer.offloading import num_cpu_blocks
from stage03_engine.core.features.lora.scheduler_hook import Known
from stage03_engine.core.features.multimodal.scheduler_hook import made_of
from stage03_engine.core.kv_cache_manager import KVCacheManager
from stage03_engine.core.request import Request
from stage03_engine.frontend.features.data_parallel import prefix_index
from stage03_engine.frontend.features.data_parallel.balancing import Candidate, choose_engine
from stage03_engine.frontend.features.data_parallel.client import EMPTIES, DPLBAsyncMPClient
from stage03_engine.frontend.features.data_parallel.prefix_index import PrefixIndex
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.params.multimodal import MultiModalFeature, MultiModalInputs
from stage03_engine.params.pooling_params import PoolingParams
from stage03_engine.sampling_params import SamplingParams

CORE = Path(__file__).parents[2] / "stage03_engine" / "core"
score: Any = simulation()
SIZE = 4
TOKENS = list(range(3 * SIZE + 2))


def request(tokens: list[int], salt: str | None = None, task: Any = None, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest("r", tokens, SamplingParams(**params), cache_salt=salt, task=task)


def index_of(num_blocks: int = 100, kept: int = 0, share: float = 1.0) -> PrefixIndex:
    index = PrefixIndex(SIZE, kept, share)
    index.join(0, num_blocks)
    return index


def num_known(index: PrefixIndex, made: EngineCoreRequest) -> int:
    return len(index.last_used(0, index.hashes(made), made))


def serve(index: PrefixIndex, made: EngineCoreRequest, answer: tuple[int, ...] = ()) -> None:
    """It goes to the engine and ends there."""
    hashes = index.hashes(made)
    index.sent(0, hashes)
    index.ended(0, hashes, made, answer)


# What a hash stands for


def picture(identifier: str) -> MultiModalInputs:
    return MultiModalInputs([MultiModalFeature(identifier, SIZE, 2 * SIZE, b"", 1, 1)])


def asked() -> dict[str, tuple[EngineCoreRequest, list[bytes]]]:
    """What requests may depend on besides tokens -> such a request, and the hashes that the core gives its blocks."""
    plain = request(TOKENS)
    embeds = {name: request(TOKENS, prompt_embeds=name.encode()) for name in ("embeds 1", "embeds 2")}
    adapters = {f"adapter {n}": request(TOKENS, lora="a", lora_int_id=n) for n in (1, 2)}
    pictures = {name: request(TOKENS, task=picture(name)) for name in ("picture 1", "picture 2")}
    cases = {
        "plain": plain,
        "salt 1": request(TOKENS, "1"),
        "salt 2": request(TOKENS, "2"),
        **embeds,
        **adapters,
        **pictures,
    }
    cases |= {"salted picture": request(TOKENS, "1", picture("picture 1")), "again": request(TOKENS)}
    return {name: (made, core_hashes(made)) for name, made in cases.items()}


def core_hashes(made: EngineCoreRequest) -> list[bytes]:
    """As the scheduler's hooks of these features do."""
    own, params = Request(made, seed=0), made.sampling_params
    if params.lora is not None:
        own.add_hash_key(Known(params.lora, "digest").hash_key(params.lora_int_id))
    if params.prompt_embeds is not None:
        own.add_hash_key(f"prompt_embeds:{params.prompt_embeds!r}")
    for each in getattr(made.task, "features", ()):
        own.all_token_ids[each.offset : each.offset + each.length] = made_of(each.identifier, each.length)
    KVCacheManager(BlockPool(9), SIZE, enable_caching=True).get_computed_blocks(own)
    return own.block_hashes


def test_its_hashes_separate_what_those_of_the_blocks_separate() -> None:
    """Two requests share as many blocks for the router as they do in the core: no more, no less."""
    index, cases = index_of(), asked()
    for name, (one, blocks) in cases.items():
        for other_name, (other, other_blocks) in cases.items():
            shared = sum(a == b for a, b in zip(index.hashes(one), index.hashes(other), strict=True))
            assert shared == sum(a == b for a, b in zip(blocks, other_blocks, strict=True)), (name, other_name)
    assert sum(a == b for a, b in zip(*(index.hashes(cases[f"picture {n}"][0]) for n in "12"))) == 1, (
        "before the picture"
    )


def test_all_that_adds_to_a_blocks_hash_is_known() -> None:
    """Whoever lets blocks depend on more must tell the router, and add a case above."""
    adding = {path.parent.name for path in CORE.rglob("*.py") if ".add_hash_key(" in path.read_text(encoding="utf-8")}
    assert adding == {"lora", "prompt_embeds"}
    changing = {
        path.parent.name for path in CORE.rglob("*.py") if re.search(r"all_token_ids\[.*\] = ", path.read_text("utf-8"))
    }
    assert changing <= {"multimodal"}


def test_nothing_is_expected_where_all_is_computed() -> None:
    index = index_of()
    serve(index, request(TOKENS))
    assert num_known(index, request(TOKENS)) == 3
    assert num_known(index, request(TOKENS[: 3 * SIZE])) == 2, "the last token is always computed"
    assert num_known(index, request(TOKENS, prompt_logprobs=1)) == 0
    assert num_known(index, request(TOKENS, task=PoolingParams(needs_all_tokens=True))) == 0


# What is evicted


def test_the_longest_unused_go_first_and_the_end_of_a_text_before_its_beginning() -> None:
    index, long, short = index_of(3), request(TOKENS), request([0, 1, 2, 3, 9, 9, 9, 9, 9])
    serve(index, long)
    assert (num_known(index, long), num_known(index, short)) == (3, 1)
    serve(index, short)
    assert (num_known(index, long), num_known(index, short)) == (2, 2)


@given(seed=st.integers(0, 10**6), blocks=st.integers(50, 90), engines=st.integers(1, 3))
def test_one_request_at_a_time_it_knows_what_every_cache_holds(seed: int, blocks: int, engines: int) -> None:
    """Answers, evictions and the order in which blocks go: all as in a real cache, whichever engine is chosen; but for one block, whose place
    the half-filled end of a text may have taken."""
    draw = random.Random(seed)
    turns = [(talk, turn) for talk in range(8) for turn in range(3)]
    draw.shuffle(turns)
    talks = tuple(
        score.Talk(
            20_000 * at,
            (talk % 3, 8),
            tuple(score.Turn(draw.randint(1, 30), draw.randint(1, 30)) for _ in range(turn + 1)),
        )
        for at, (talk, turn) in enumerate(turns)
    )
    load = score.Load(talks, engines, blocks=blocks, block_size=SIZE, max_num_batched_tokens=4096)
    run = score.Run(load, lambda candidates, _: draw.choice(candidates).engine).to_the_end()
    assert len(run.asked) == sum(len(talk.turns) for talk in talks)
    for each in run.asked:
        assert 0 <= each.choice.cached_blocks - each.request.num_cached_tokens // SIZE <= 1
    assert any(each.choice.cached_blocks for each in run.asked)


def test_copies_that_are_kept_elsewhere_count() -> None:
    """And a reset leaves them where they are."""
    index, texts = index_of(3, kept=6), [request([10 * n + i for i in range(2 * SIZE + 1)]) for n in range(4)]
    for made in texts:
        serve(index, made)
    assert [num_known(index, made) for made in texts] == [0, 2, 2, 2]
    index.reset(0)
    assert [num_known(index, made) for made in texts] == [0, 2, 2, 2]
    small = index_of(6, kept=2)
    for made in texts:
        serve(small, made)
    small.reset(0)
    assert [num_known(small, made) for made in texts] == [0, 0, 0, 2]


@pytest.mark.parametrize("size", [None, 0.25])
def test_an_engine_that_offloads_keeps_as_many_as_its_memory_holds(size: float | None) -> None:
    async def test() -> None:
        small = {"model": "gpt2-tiny", "data_parallel_size": 2, "data_parallel_routing": "prefix"}
        config = EngineArgs.from_kwargs(**small, kv_offloading_size=size)
        client = DPLBAsyncMPClient(config, Engines())
        client.start_process()
        await client.start()
        index = client._balancer._prefixes
        assert index is not None
        num_blocks = num_cpu_blocks(config) if size else 99  # of a SteeredEngine, without the null block
        assert index._capacity == {0: num_blocks, 1: num_blocks} and num_blocks >= 99
        client.shutdown()

    run(test)


def test_several_front_ends_share_the_caches() -> None:
    index, made = index_of(12, share=0.25), [request([100 * n + i for i in range(2 * SIZE + 1)]) for n in range(3)]
    for each in made:
        serve(index, each)
    assert [num_known(index, each) for each in made] == [0, 1, 2]


# What the engines say


def test_whoever_misses_a_block_has_lost_all_that_was_used_before_it() -> None:
    index = index_of()
    texts = [request([100 * n + i for i in range(2 * SIZE + 1)]) for n in range(4)]
    for made in texts:
        serve(index, made, (1,) * (2 * SIZE) if made is texts[2] else ())
    hashes, longer = index.hashes(texts[2]), request([*texts[2].prompt_token_ids, *(1,) * (2 * SIZE)])
    expected = index.last_used(0, hashes, texts[2])
    index.found(0, expected, 2 * SIZE)  # it had all
    assert [num_known(index, made) for made in texts] == [2, 2, 2, 2] and num_known(index, longer) == 4
    index.sent(0, hashes)
    index.found(0, expected, SIZE)  # but not its second block
    assert [num_known(index, made) for made in texts] == [0, 0, 2, 2] and num_known(index, longer) == 2


def test_what_may_not_be_computed_yet_proves_nothing() -> None:
    index, old, new = index_of(), request([7] * 9), request(TOKENS)
    serve(index, old)
    index.sent(0, index.hashes(new))  # it is being computed; the next one comes too early to find it
    index.found(0, index.last_used(0, index.hashes(new), new), 0)
    assert num_known(index, old) == 2 and num_known(index, new) == 3


def test_a_cache_that_others_fill_is_not_trusted_for_long() -> None:
    """Half of the requests come through another front end, of which this one does not hear: how many blocks it expects in vain."""

    def in_vain(share: float, listens: bool) -> int:
        draw, wrong, cache, index = random.Random(4), 0, index_of(40), index_of(40, share=share)
        for _ in range(600):
            made = request([draw.randrange(12)] * 17 + [draw.randrange(4)] * 8)
            if draw.random() < 0.5:
                serve(cache, made)
                continue
            expected, really = index.last_used(0, index.hashes(made), made), num_known(cache, made)
            wrong += max(0, len(expected) - really)
            for each in (index, cache):
                serve(each, made)
            if listens:
                index.found(0, expected, really * SIZE)
        return wrong

    assert in_vain(1.0, True) < in_vain(1.0, False)
    assert in_vain(0.5, False) < 0.5 * in_vain(1.0, False)


# What it costs


def test_time_grows_with_the_prompt_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, answer and evictions included: what is hashed is counted."""
    hashed = 0

    def counting(what: object) -> int:
        nonlocal hashed
        hashed += len(what) if isinstance(what, tuple) else 1
        return hash(what)

    monkeypatch.setattr(prefix_index, "hash", counting, raising=False)
    costs = []
    for length in (2_000, 4_000):
        hashed, index = 0, index_of(50)
        features = [MultiModalFeature("p", place, 5, b"", 1, 1) for place in range(0, length, 10)]
        serve(index, request(list(range(length)), task=MultiModalInputs(features)), tuple(range(length)))
        costs.append(hashed)
    assert costs[1] < 2.1 * costs[0]


def test_it_holds_no_more_than_the_caches() -> None:
    index = index_of(50)
    for number in range(40):
        serve(index, request(list(range(number, number + 4_000))), tuple(range(4_000)))
        assert len(index._known[0]) <= 50
    index.leave(0)
    assert not index._known and not index._capacity


# The client


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def test_the_client_tells_the_router_what_becomes_of_a_request() -> None:
    """Answers count, caches that are emptied do not, and neither does an engine that died: it comes back with an empty one."""

    async def test() -> None:
        engines = Engines()
        client = DPLBAsyncMPClient(config_of(2, routing="prefix", restart=9), engines)
        client.start_process()
        await client.start()
        reading = asyncio.create_task(read(client))
        size = client._config.cache_config.block_size
        prompt, index = list(range(2 * size)), client._balancer._prefixes
        assert index is not None

        def known(tokens: list[int]) -> list[int]:
            made = request(tokens)
            return [len(index.last_used(engine, index.hashes(made), made)) for engine in (0, 1)]

        async def serve_one() -> list[int]:
            made = EngineCoreRequest("r", prompt, SamplingParams(max_tokens=2 * size, temperature=0))
            await client.add_request_async(made)
            first = engines[0].requests["r"]
            for _ in range(2 * size):
                engines[0].step()
                await settle()
            return [*prompt, *(token_at(first, place) for place in range(2 * size)), 1]

        whole = await serve_one()
        assert known(whole) == [3, 0], "the last token of an answer is not computed"
        for method in EMPTIES:
            assert await client.call(method) is True
            assert known(whole) == [0, 0], method
            await serve_one()
        engines[1].answer = False
        assert not await client.call("reset_prefix_cache")
        assert known(whole) == [0, 0], "the first has done it"
        await serve_one()
        engines.waits = False
        engines[0].die()
        while client.num_ready == 2:
            await asyncio.sleep(0)
        while client.num_ready < 2:
            await asyncio.sleep(0)
        assert known(whole) == [0, 0]
        client.shutdown()
        reading.cancel()

    run(test)


async def read(client: DPLBAsyncMPClient) -> None:
    while True:
        await client.get_output_async()


def test_every_call_that_empties_a_cache_is_known() -> None:
    """Those of the rooms that reset the block pool. `prepare_weights` and the like do not empty it."""
    resetting = {
        path.parent.name
        for path in CORE.rglob("*.py")
        if re.search(r"^ +(return )?reset\(", path.read_text("utf-8"), re.M)
    }
    assert resetting == {"prefix_cache_reset", "sleep", "weight_updates"} and len(EMPTIES) == len(resetting)


# The choice


@given(loads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6))
def test_most_of_the_prompt_among_those_that_are_not_too_busy(loads: list[tuple[int, int, int]]) -> None:
    candidates = [Candidate(n, *load) for n, load in enumerate(loads)]
    chosen = candidates[choose_engine(candidates, 9)]
    lowest = min(each.score for each in candidates)
    assert chosen.score <= lowest + 16
    for other in candidates:
        if other.score <= lowest + 16:
            assert (-other.cached_blocks, other.score, other.engine) >= (
                -chosen.cached_blocks,
                chosen.score,
                chosen.engine,
            )


def test_chats_wait_less_and_compute_less() -> None:
    """Simulated: the figures are the same on every machine."""
    for load in (score.chats("a", 2), score.chats("a", 4)):
        by_load, by_prefix = (
            score.score(score.Run(load, policy).to_the_end()) for policy in (score.least_busy, choose_engine)
        )
        assert by_prefix.ttft < 0.7 * by_load.ttft and by_prefix.hits > 1.3 * by_load.hits
        assert by_prefix.throughput > by_load.throughput
