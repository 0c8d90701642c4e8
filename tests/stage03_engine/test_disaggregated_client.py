"""The client of engines with roles, over engines that do what a test says: where a request goes next, and that its counts and indexes stay right.

A request passes a prefill engine, unless a test says how many tokens a decode engine may compute itself (`local`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from patience import PATIENCE
from steered_engines import Engines, SteeredEngine, config_of, settle, started

from stage03_engine.frontend.features.data_parallel.balancing import MOST_BEHIND
from stage03_engine.frontend.features.disaggregation.client import PARAMS, DisaggregatedClient
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from stage03_engine.sampling_params import SamplingParams

PROMPT = list(range(40))  # two full blocks
PREFILL, DECODE = 0, 1


class Role(SteeredEngine):
    """One that says where it keeps blocks, as a producer does, if it `keeps` any."""

    keeps = True

    def _next(self, request: EngineCoreRequest, changed: bool) -> EngineCoreOutput:
        output, params = super()._next(request, changed), request.sampling_params.kv_transfer_params or {}
        output.queued_seconds = 1.0 + self.index if self.places[request.request_id] == 1 else None
        if self.keeps and params.get("do_remote_decode") and output.finish_reason is not None:
            place = {"remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": 7}
            output.result = {PARAMS: {"do_remote_prefill": True, **place}}
        return output

    def end(self, request_id: str, reason: FinishReason) -> None:
        del self.requests[request_id]
        ended = EngineCoreOutput(request_id, [], None, reason, error="no" if reason == FinishReason.ERROR else None)
        self._said.put_nowait(EngineCoreOutputs([ended], self.stats))


class Front:
    """A client of one prefill engine and some decode engines, and what it passed on."""

    def __init__(self, num_decode: int, local: int) -> None:
        config = config_of(1 + num_decode, routing="prefix", restart=9)
        roles = replace(
            config.disaggregation_config, disaggregate=f"1:{num_decode}", num_prefill=1, num_decode=num_decode,
            max_local_prefill_length=local,
        )  # fmt: skip
        self.engines = Engines(Role)
        self.client = DisaggregatedClient(replace(config, disaggregation_config=roles), self.engines)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.queued: list[float] = []

    async def read(self) -> None:
        while True:
            for output in (await self.client.get_output_async()).outputs:
                assert output.request_id not in self.ended, "something came after the end"
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.queued += [] if output.queued_seconds is None else [output.queued_seconds]
                if output.finish_reason is not None:
                    self.ended[output.request_id] = output.finish_reason

    async def add(self, name: str, prompt: list[int] = PROMPT) -> None:
        await self.client.add_request_async(EngineCoreRequest(name, prompt, SamplingParams(max_tokens=3, seed=1)))
        await settle()

    async def step(self, engine: int, times: int = 1) -> None:
        for _ in range(times):
            self.engines[engine].step()
            await settle()

    def num_requests(self) -> list[int]:
        return [engine.num_requests for _, engine in sorted(self.client._engines.items())]

    def where(self) -> list[list[str]]:
        """The requests of each engine."""
        return [list(engine.requests) for engine in self.engines.made]

    def known(self, engine: int) -> int:
        """How many blocks of the prompt the router expects there."""
        side = self.client._sides.prefill if engine == PREFILL else self.client._sides.decode
        index, made = side._prefixes, EngineCoreRequest("x", [*PROMPT, 1], SamplingParams())
        assert index is not None
        return len(index.last_used(engine, index.hashes(made), made))

    def assert_nothing_is_left(self) -> None:
        assert not any(self.num_requests())
        client = self.client
        assert (
            not client._requests
            and not client._held
            and not client._prefilling
            and not client._kept
            and not client._queued
        )


def run(test: Callable[[Front], Awaitable[None]], num_decode: int = 1, local: int = 0) -> None:
    async def whole() -> None:
        async with started(Front(num_decode, local)) as made:
            await test(made)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_prompt_is_computed_by_a_prefill_engine_once(keeps: bool) -> None:
    """Also one of which it could keep no block: the decode engine computes that."""

    async def test(made: Front) -> None:
        made.engines[PREFILL].keeps = keeps
        await made.add("r")
        assert [len(engine.requests) for engine in made.engines.made] == [1, 0]
        await made.step(PREFILL)
        assert [len(engine.requests) for engine in made.engines.made] == [0, 1]
        params: Any = made.engines[DECODE].requests["r"].sampling_params
        assert (params.kv_transfer_params is not None, params.max_tokens) == (keeps, 3)
        await made.step(DECODE, 3)
        assert made.ended == {"r": FinishReason.LENGTH} and len(made.tokens["r"]) == 3
        assert made.queued == [1.0 + 2.0], "it waited at both engines, and is counted once"
        made.assert_nothing_is_left()
        assert made.engines[PREFILL].calls == []

    run(test)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_what_a_prefill_engine_refuses_is_refused(reason: FinishReason) -> None:
    """An engine that sleeps, an adapter that cannot be read: no other engine is asked, and the client hears why."""

    async def test(made: Front) -> None:
        await made.add("r")
        made.engines[PREFILL].end("r", reason)
        await settle()
        assert made.ended == {"r": reason} and made.tokens == {"r": []}
        assert [len(engine.requests) for engine in made.engines.made] == [0, 0]
        made.assert_nothing_is_left()

    run(test)


def test_both_indexes_learn_and_a_death_empties_one() -> None:
    """Of a prompt that a prefill engine died with nothing is expected there; the counts stay those of what runs."""

    async def test(made: Front) -> None:
        await made.add("a")
        assert (made.known(PREFILL), made.known(DECODE), made.num_requests()) == (2, 0, [1, 0])
        await made.step(PREFILL)
        assert (made.known(PREFILL), made.known(DECODE), made.num_requests()) == (2, 2, [0, 1])
        await made.add("b")
        await made.add("c")
        made.engines[PREFILL].die()
        await settle()
        assert (made.known(DECODE), made.num_requests()) == (2, [0, 3])
        made.engines[PREFILL].may_start.set()
        await settle()
        assert made.known(PREFILL) == 0
        made.engines[DECODE].die()  # the first begins again; the others were on two engines that died
        await settle()
        assert (made.known(PREFILL), made.num_requests()) == (2, [1, 0])
        assert made.ended == dict.fromkeys(("b", "c"), FinishReason.ERROR)
        made.engines[DECODE].may_start.set()
        await made.step(PREFILL)
        assert (made.known(DECODE), made.num_requests()) == (2, [0, 1])
        await made.step(DECODE, 3)
        assert made.ended["a"] == FinishReason.LENGTH
        made.assert_nothing_is_left()

    run(test)


def test_a_client_that_leaves_between_the_engines_gives_the_blocks_back() -> None:
    """While nobody has the request, and when its first token comes too late."""

    async def test(made: Front) -> None:
        await made.add("between")
        made.engines[PREFILL].step()
        while made.client.engine_of("between") is not None:
            await asyncio.sleep(0)
        await made.client.abort_requests_async(["between"])
        await settle()
        assert made.engines[PREFILL].calls.pop() == "release_kv_blocks" and not made.engines[DECODE].requests
        made.assert_nothing_is_left()
        await made.add("late")
        last = made.engines[PREFILL]._next(made.engines[PREFILL].requests["late"], False)
        await made.client.abort_requests_async(["late"])
        made.engines[PREFILL]._said.put_nowait(EngineCoreOutputs([last]))
        await settle()
        assert made.engines[PREFILL].calls == ["release_kv_blocks"] and not made.tokens
        made.assert_nothing_is_left()

    run(test)


# What a decode engine has


async def turn(made: Front, name: str, prompt: list[int], engine: int) -> list[int]:
    """One of a chat, which passes the prefill engine and goes on at that one: all that was said."""
    await made.add(name, prompt)
    assert made.where()[PREFILL] == [name]
    await made.step(PREFILL)
    assert made.where()[engine] == [name]
    await made.step(engine, 3)
    return prompt + made.tokens[name]


@pytest.mark.parametrize(("missing", "is_computed_there"), [(1, True), (8, True), (9, False), (16, False), (17, False)])
def test_what_a_decode_engine_has_nearly_all_of_goes_straight_there(missing: int, is_computed_there: bool) -> None:
    """Up to `max_local_prefill_length` tokens behind the blocks that it has; the index knows the answer too."""

    async def test(made: Front) -> None:
        said = await turn(
            made, "first", PROMPT + list(range(6)), DECODE
        )  # 46 tokens, and 3 of an answer: three full blocks
        await made.add("second", said[:48] + [99] * missing)
        assert made.where() == ([[], ["second"]] if is_computed_there else [["second"], []])
        choice = made.client._requests["second"].choice
        assert choice is not None and choice.cached_blocks == (3 if is_computed_there else 2), "of the prompt alone"
        if is_computed_there:
            params: Any = made.engines[DECODE].requests["second"].sampling_params
            assert (params.kv_transfer_params, params.max_tokens) == (None, 3)
        else:
            await made.step(PREFILL)
        await made.step(DECODE, 3)
        assert made.ended == dict.fromkeys(("first", "second"), FinishReason.LENGTH) and len(made.tokens["second"]) == 3
        made.assert_nothing_is_left()

    run(test, local=8)


def test_a_short_prompt_is_computed_where_its_answer_is() -> None:
    """The way round would take longer; without a decode engine the other one does all of it."""

    async def test(made: Front) -> None:
        await made.add("short", PROMPT[:20])
        assert made.where() == [[], ["short"]]
        made.engines[DECODE].die()
        await settle()
        assert made.where()[PREFILL] == ["short"] and not made.client._prefilling
        await made.step(PREFILL, 3)
        assert made.ended == {"short": FinishReason.LENGTH} and len(made.tokens["short"]) == 3
        made.assert_nothing_is_left()

    run(test, local=32)


def test_a_chat_comes_back_to_the_decode_engine_that_has_its_turns() -> None:
    """Also past a prefill engine, so that only the new blocks need to travel; but not to one that is much busier."""

    async def test(made: Front) -> None:
        one = await turn(made, "a1", PROMPT, DECODE)
        await made.add("busy", [99] * 40)
        await made.step(PREFILL)
        assert made.where() == [[], ["busy"], []], "of two that are idle the first"
        other = await turn(made, "b1", [77] * 40, DECODE + 1)
        await made.client.abort_requests_async(["busy"])
        again = await turn(made, "a2", one + [1] * 40, DECODE)
        await turn(made, "b2", other + [1] * 40, DECODE + 1)
        assert choice_of(made, again) == (DECODE, 5)
        made.client._sides.decode.loads[DECODE].seen(waiting=0, running=MOST_BEHIND, own=0)
        assert choice_of(made, again) == (DECODE, 5)
        made.client._sides.decode.loads[DECODE].seen(waiting=0, running=MOST_BEHIND + 1, own=0)
        assert choice_of(made, again) == (DECODE + 1, 0)

    run(test, num_decode=2)


def choice_of(made: Front, prompt: list[int]) -> tuple[int, int]:
    """(the decode engine that a request would go to now, the blocks that it has of it)"""
    choice = made.client._sides.decode.look(EngineCoreRequest("next", prompt, SamplingParams()))
    assert choice is not None
    return choice.engine, choice.cached_blocks
