"""The client of engines with roles, over engines that do what a test says: where a request goes next, and that its counts and indexes stay right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from patience import PATIENCE
from steered_engines import Engines, SteeredEngine, config_of, settle, started

from stage03_engine.disaggregation.client import PARAMS, DisaggregatedClient
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
    """A client of one prefill engine and one decode engine, and what it passed on."""

    def __init__(self) -> None:
        config = config_of(2, routing="prefix", restart=9)
        roles = replace(config.disaggregation_config, disaggregate="1:1", num_prefill=1, num_decode=1)
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
        return [self.client._engines[each].num_requests for each in (PREFILL, DECODE)]

    def known(self, engine: int) -> int:
        """How many blocks of the prompt the router expects there."""
        side = self.client._sides.prefill if engine == PREFILL else self.client._sides.decode
        index, made = side._prefixes, EngineCoreRequest("x", [*PROMPT, 1], SamplingParams())
        assert index is not None
        return len(index.last_used(engine, index.hashes(made), made))

    def assert_nothing_is_left(self) -> None:
        assert self.num_requests() == [0, 0]
        client = self.client
        assert (
            not client._requests
            and not client._held
            and not client._prefilling
            and not client._kept
            and not client._queued
        )


def run(test: Callable[[Front], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with started(Front()) as made:
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
