"""The judge of exercise 3: it plays an engine that behaves, and several that do not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import zmq
from fake_engine import READY, SETTINGS, Engine, Handshake, Popen, outputs, play, process_of
from hypothesis import given, strategies as st
from judging import Judge

from stage03_engine import messages
from stage03_engine.errors import EngineDeadError, EngineStartError
from stage03_engine.frontend.engine_process import HELLO_SECONDS
from stage03_engine.messages import (  # fmt: skip
    AbortRequests,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineFailed,
    EngineHello,
    EngineInit,
)
from stage03_engine.sampling_params import SamplingParams

judge = Judge(3)
HELLO = EngineHello(pid=1, monotonic_ns=0)
FAILED = EngineFailed("there is no room for the KV cache")


@contextmanager
def handshake(engine: str) -> Iterator[Handshake]:
    with judge.case(engine=engine):
        sockets = Handshake(judge)
        try:
            yield sockets
        finally:
            sockets.destroy()


OTHERS = (OSError, RuntimeError, asyncio.InvalidStateError)
"""What somebody might raise in the place of the right error."""


def error_of(key: str, work: Any) -> str:
    """The words of the EngineStartError that must come."""
    try:
        got = work()
    except EngineStartError as error:
        return str(error)
    except NotImplementedError:
        raise
    except OTHERS as error:
        judge.rejects(key, "an EngineStartError", f"{type(error).__name__}: {error}", error)
    judge.rejects(key, "an EngineStartError", f"no exception, but {got!r}")
    raise AssertionError


def test_an_engine_that_becomes_ready(impl: ModuleType) -> None:
    with handshake("says hello, then ready") as sockets:
        sockets.say(HELLO)
        sockets.after_init = [READY]
        process = process_of(impl, sockets, Popen())
        judge.equal("ready", READY, process.shake_hands())
        judge.holds("ready", sockets.closed, "the handshake's socket is closed", "it is open")
        heard = sockets.heard()
        [init] = heard if len(heard) == 1 else [None]
        judge.holds("hello", isinstance(init, EngineInit), "one EngineInit for the engine", f"it heard {heard}")
        place = (init.config, init.input_address, init.output_address)
        judge.equal("hello", (SETTINGS, process.input_address, process.output_address), place)


def test_an_engine_that_cannot_start(impl: ModuleType) -> None:
    with handshake(f"says hello, then failed: {FAILED.message!r}") as sockets:
        sockets.say(HELLO)
        sockets.after_init = [FAILED]
        got = error_of("ready", process_of(impl, sockets, Popen()).shake_hands)
        judge.equal("ready", FAILED.message, got)
        judge.holds("ready", sockets.closed, "the handshake's socket is closed", "it is open")


def test_an_engine_that_ends_while_it_loads(impl: ModuleType) -> None:
    for said in (0, 1):
        with handshake("says hello, then it is killed" if said else "is killed before it says anything") as sockets:
            if said:
                sockets.say(HELLO)
            got = error_of("ended", process_of(impl, sockets, Popen(-9)).shake_hands)
            judge.holds("ended", "exit code -9" in got, "an EngineStartError that names the exit code -9", got)
            judge.holds("ready", sockets.closed, "the handshake's socket is closed", "it is open")


def test_the_last_words_of_an_engine(impl: ModuleType) -> None:
    with handshake(f"says hello; between a look at the socket and a look at the process: {FAILED.message!r}, and ends") as sockets:  # fmt: skip
        sockets.say(HELLO)
        process = process_of(impl, sockets, Popen(1, before_end=lambda: sockets.say(FAILED)))
        judge.equal("words", FAILED.message, error_of("words", process.shake_hands))


def test_an_engine_that_says_nothing(impl: ModuleType) -> None:
    with handshake("runs, but says nothing; _receive(limit=0.02)") as sockets:
        process = process_of(impl, sockets, Popen())
        got = error_of("ended", lambda: process._receive(0.02))
        judge.holds("ended", "said nothing" in got, "an EngineStartError: the engine process said nothing", got)


def test_how_long_the_client_waits(impl: ModuleType) -> None:
    with handshake("says hello, then ready") as sockets:
        sockets.say(HELLO)
        sockets.after_init = [READY]
        process, limits = process_of(impl, sockets, Popen()), []
        receive = process._receive

        def noted(limit: float = math.inf) -> Any:
            limits.append(limit)
            return receive(limit)

        process._receive = noted
        process.shake_hands()
        judge.holds("ended", limits[0] == HELLO_SECONDS, f"it waits {HELLO_SECONDS:g} s for hello", f"{limits[0]} s")


def test_the_sockets(impl: ModuleType) -> None:
    addresses = SimpleNamespace(input_address="inproc://input", output_address="inproc://output")
    context = zmq.Context()
    with judge.case(process="with the addresses inproc://input and inproc://output"):
        try:
            with limits_when_bound() as seen:
                pair = impl.bind_sockets(context, addresses)
            judge.equal("bound", [{"SNDHWM": 0, "RCVHWM": 0}] * 2, seen)  # what is set later counts for nobody
            for socket, kind, address in zip(pair, (zmq.ROUTER, zmq.PULL), vars(addresses).values(), strict=True):
                where = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
                judge.equal("bound", (kind.name, address), (zmq.SocketType(socket.socket_type).name, where))
                limits = {name: socket.getsockopt(getattr(zmq, name)) for name in ("SNDHWM", "RCVHWM", "LINGER")}
                judge.equal("bound", dict.fromkeys(limits, 0), limits)
        finally:
            context.destroy(linger=0)


@contextmanager
def limits_when_bound() -> Iterator[list[dict[str, int]]]:
    """The limits to the queue of each socket when it is bound."""
    bind, seen = zmq.Socket.bind, list[dict[str, int]]()

    def noted(socket: Any, address: str) -> Any:
        seen.append({name: socket.getsockopt(getattr(zmq, name)) for name in ("SNDHWM", "RCVHWM")})
        return bind(socket, address)

    with mock.patch.object(zmq.Socket, "bind", noted):
        yield seen


def test_start(impl: ModuleType) -> None:
    async def scenario(client: Any, engine: Engine) -> None:
        """The engine is ready, but its end of the input socket is not connected yet."""
        engine.connects_late = True
        client._process, client.start_process = None, lambda: setattr(client, "_process", engine)
        start = asyncio.ensure_future(client.start())
        asked = asyncio.ensure_future(asyncio.to_thread(engine.asked.wait, 1))
        await asyncio.wait({start, asked}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
        await asyncio.wait({start}, timeout=0.05)
        early = start.done() and start.exception() is None
        judge.holds("first", not early, "start() waits for the engine's first message", "it returns before that came")
        engine.connect()
        judge.equal("ready", READY, await engine.soon("first", "start() returns", start))

    with judge.case(engine="says ready, and connects its input socket a moment later"):
        play(judge, impl, scenario, started=False)


REQUEST = EngineCoreRequest("r0", [1, 2, 3], SamplingParams(max_tokens=4))


def test_messages_to_the_engine(impl: ModuleType) -> None:
    async def scenario(client: Any, engine: Engine) -> None:
        client._input.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what would be dropped is an error
        await engine.soon("frames", "it is sent", routed(client.add_request_async(REQUEST)))
        check_frames(await engine.receive(), EngineCoreRequestType.ADD, REQUEST)
        await engine.soon("frames", "it is sent", routed(client.abort_requests_async(["r0", "r1"])))
        check_frames(await engine.receive(), EngineCoreRequestType.ABORT, AbortRequests(["r0", "r1"]))

    with judge.case(messages="add_request_async(a request r0), abort_requests_async(['r0', 'r1'])"):
        play(judge, impl, scenario)


def check_frames(frames: list[bytes], kind: EngineCoreRequestType, message: Any) -> None:
    expected = f"{kind.name}: the identity, {kind.value!r}, the {type(message).__name__} in msgpack"
    right = [kind.value, messages.encode(message)]
    judge.holds("frames", frames == right, expected, f"behind the identity: {frames}")


async def routed(sending: Any) -> None:
    """The same, with a verdict if the first frame is not the engine's identity."""
    try:
        await sending
    except zmq.ZMQError as error:
        judge.rejects(
            "frames", "the engine's identity as the first frame", f"{error}: the ROUTER knows no such peer", error
        )


def test_outputs_in_order(impl: ModuleType) -> None:
    async def scenario(client: Any, engine: Engine) -> None:
        engine.sends_early = [outputs(1), outputs(2)]
        await engine.soon("first", "start() returns", client.start())
        for steps in ((1, 2), (3,), (4, 5, 6)):
            if steps[0] > 2:
                for step in steps:
                    engine.send(outputs(step))
            for step in steps:
                got = await engine.soon("all", f"the outputs of step {step}", client.get_output_async())
                judge.equal("all", outputs(step), got)

    with judge.case(engine="sends steps 1 and 2 while start() runs; later 3; then 4, 5 and 6 at once"):
        play(judge, impl, scenario, started=False)


@judge.settings(8)
@given(order=st.permutations([0, 1, 2]), results=st.tuples(st.booleans(), st.booleans(), st.booleans()), gone=st.sampled_from([None, None, 0, 1, 2]))  # fmt: skip
def test_calls(impl: ModuleType, order: list[int], results: tuple[bool, ...], gone: int | None) -> None:
    async def scenario(client: Any, engine: Engine) -> None:
        calls, ids = [], []
        for number in range(3):
            calls.append(asyncio.ensure_future(client.call(f"method_{number}")))
            kind, payload = await engine.receive()
            judge.equal("frames", EngineCoreRequestType.UTILITY.value, kind)
            request = messages.decode_utility(payload)
            judge.equal("by_id", f"method_{number}", request.method)
            ids.append(request.call_id)
        judge.holds("by_id", len(set(ids)) == 3, "three different ids", ids)
        if gone is not None:
            calls[gone].cancel()
            await asyncio.gather(calls[gone], return_exceptions=True)
        for place, number in enumerate(order):
            with late_answers():
                engine.answer(ids[number], results[number])
                engine.answer(10**6, True)  # of a call that nobody made
                engine.send(outputs(place))
                got = await engine.soon("by_id", "the outputs behind an answer", client.get_output_async())
            judge.equal("by_id", outputs(place), got)
            if number != gone:
                got = await engine.soon("by_id", f"the answer to call {number}", calls[number])
                judge.holds("by_id", got is results[number], f"{results[number]} for call {number}", got)

    given_up = "" if gone is None else f"; the caller of {gone} has given up"
    with judge.case(calls="0, 1 and 2 wait" + given_up, answers=[f"{number}: {results[number]}" for number in order]):
        play(judge, impl, scenario)


@contextmanager
def late_answers() -> Iterator[None]:
    """What goes wrong here, did so when an answer came for which nobody waits."""
    try:
        yield
    except (asyncio.InvalidStateError, KeyError) as error:
        judge.rejects("late", "the answer is dropped", f"{type(error).__name__}: {error}", error)


async def dead(engine: Engine, who: str, awaitable: Any) -> None:
    """Must raise EngineDeadError."""
    try:
        got = await engine.soon("death", f"an EngineDeadError for {who}", awaitable)
    except EngineDeadError:
        return
    except NotImplementedError:
        raise
    except OTHERS as error:
        judge.rejects("death", f"an EngineDeadError for {who}", f"{type(error).__name__}: {error}", error)
    judge.rejects("death", f"an EngineDeadError for {who}", got)


async def before_death(client: Any, engine: Engine) -> None:
    """The outputs of step 1 come first."""
    expected = "the outputs that came before"
    try:
        judge.equal("death", outputs(1), await engine.soon("death", expected, client.get_output_async()))
    except (EngineDeadError, asyncio.InvalidStateError) as error:
        judge.rejects("death", expected, f"{type(error).__name__}: {error}", error)


def test_death(impl: ModuleType) -> None:
    for with_notice in (True, False):

        async def scenario(client: Any, engine: Engine, with_notice: bool = with_notice) -> None:
            gone, *calls = [asyncio.ensure_future(client.call("method")) for _ in range(3)]
            for _ in range(3):
                await engine.receive()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            engine.send(outputs(1))
            if not with_notice:  # the two come by different ways
                await before_death(client, engine)
            waiting = asyncio.ensure_future(client.get_output_async()) if not with_notice else None
            engine.die(with_notice)
            if with_notice:
                await before_death(client, engine)
            await dead(engine, "whoever waits for outputs", waiting or client.get_output_async())
            for call in calls:
                await dead(engine, "whoever waits for an answer", call)
            await dead(engine, "whoever waits for outputs later", client.get_output_async())
            await dead(engine, "whoever calls later", client.call("method"))

        end = "its death notice" if with_notice else "it is killed"
        with judge.case(calls="0, 1 and 2 wait; the caller of 0 has given up", engine=f"sends outputs, then {end}"):
            play(judge, impl, scenario)
