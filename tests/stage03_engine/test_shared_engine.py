"""One engine process with several front ends, seen from the sockets of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from patience import PATIENCE

from stage03_engine import messages
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.front_ends.core_proc import JOIN
from stage03_engine.core.features.front_ends.manifest import FrontEnds
from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import bind_sockets, decode_outputs
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType as Kind,
    UtilityRequest,
)
from stage03_engine.sampling_params import SamplingParams

ALONE = EngineArgs.from_kwargs(model="gpt2-tiny", kv_cache_memory_bytes=50_000_000, max_num_seqs=1)
CONFIG: VllmConfig = replace(ALONE, front_ends=FrontEnds(3))  # type: ignore[call-arg]


class FrontEnd:
    """The two sockets of one API server."""

    def __init__(self, process: EngineProcess, index: int, name: str = "first") -> None:
        self._context, self._process = zmq.Context(), process
        self._address = f"{process.output_address}_{index}_{name}"
        own = SimpleNamespace(input_address=f"{process.input_address}_{index}", output_address=self._address)
        self._input, self._output = bind_sockets(self._context, own)  # type: ignore[arg-type]
        self._output.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))

    def wait_for_engine(self) -> None:
        """And join it."""
        assert self._input.poll(1000 * PATIENCE)
        self._input.recv_multipart()
        assert self.call(0, JOIN, self._address)

    def send(self, kind: Kind, message: Any) -> None:
        self._input.send_multipart([self._process.identity, kind.value, messages.encode(message)])

    def receive(self) -> EngineCoreOutputs:
        return decode_outputs(self._output.recv_multipart())

    def until(self, done: Callable[[EngineCoreOutputs], bool]) -> list[EngineCoreOutputs]:
        """All that comes, up to the message that is looked for."""
        seen: list[EngineCoreOutputs] = []
        while not seen or not done(seen[-1]):
            seen.append(self.receive())
        return seen

    def answer(self, name: str) -> list[EngineCoreOutput]:
        """The outputs of one request, to its end."""
        seen = self.until(lambda got: any(o.request_id == name and o.finish_reason is not None for o in got.outputs))
        return [output for outputs in seen for output in outputs.outputs if output.request_id == name]

    def call(self, call_id: int, method: str, *args: str) -> bool:
        self.send(Kind.UTILITY, UtilityRequest(call_id, method, args=list(args)))
        result = self.until(lambda got: got.utility_result is not None)[-1].utility_result
        assert result is not None and result.call_id == call_id
        return result.result

    def close(self) -> None:
        self._context.destroy(linger=0)


def request(name: str, max_tokens: int = 8) -> EngineCoreRequest:
    processor = InputProcessor(CONFIG, init_tokenizer_from_configs(CONFIG))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return processor.process_inputs(name, "ROMEO:", params)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[EngineProcess, list[FrontEnd]]]:
    process = EngineProcess(CONFIG)
    try:
        front_ends = [FrontEnd(process, index) for index in range(3)]
        process.shake_hands()
        for each in front_ends:
            each.wait_for_engine()
        yield process, front_ends
    finally:
        process.shutdown()
        for each in front_ends:
            each.close()


@pytest.fixture
def pair(engine: tuple[EngineProcess, list[FrontEnd]]) -> list[FrontEnd]:
    return engine[1][:2]


def test_each_front_end_gets_its_own_outputs_and_the_first_one_the_numbers(pair: list[FrontEnd]) -> None:
    for index, front_end in enumerate(pair):
        front_end.send(Kind.ADD, request(f"of-{index}", 12))
    seen = [front_end.until(lambda got: any(o.finish_reason is not None for o in got.outputs)) for front_end in pair]
    tokens = []
    for index, messages_ in enumerate(seen):
        assert {output.request_id for got in messages_ for output in got.outputs} == {f"of-{index}"}
        tokens.append([token for got in messages_ for output in got.outputs for token in output.new_token_ids])
        assert {got.scheduler_stats is not None for got in messages_} == {index == 0}
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12


def test_an_id_that_another_front_end_uses_is_refused_and_its_owner_is_served(pair: list[FrontEnd]) -> None:
    first, second = pair
    first.send(Kind.ADD, request("same", 200))
    first.until(lambda got: bool(got.outputs))
    second.send(Kind.ADD, request("same"))
    [refused] = second.answer("same")
    assert "in use" in (refused.error or "") and not refused.new_token_ids
    assert sum(len(output.new_token_ids) for output in first.answer("same")) == 199


def test_calls_are_answered_to_who_asked(pair: list[FrontEnd]) -> None:
    first, second = pair
    assert [first.call(7, "reset_prefix_cache"), second.call(7, "reset_prefix_cache"), first.call(8, "no_such")] == [
        True, True, False,
    ]  # fmt: skip


def test_a_front_end_hears_of_steps_that_bring_it_nothing(pair: list[FrontEnd]) -> None:
    """Its request waits behind that of another; silence would say that the engine stands still."""
    first, second = pair
    first.send(Kind.ADD, request("runs", 200))
    first.until(lambda got: bool(got.outputs))
    second.send(Kind.ADD, request("waits"))
    assert not second.receive().outputs
    assert sum(len(output.new_token_ids) for output in second.answer("waits")) == 8
    first.answer("runs")


def test_an_abort_is_answered_with_a_sign_of_life(pair: list[FrontEnd]) -> None:
    _, second = pair
    second.send(Kind.ADD, request("left", 400))
    second.until(lambda got: bool(got.outputs))
    second.send(Kind.ABORT, AbortRequests(["left"]))
    last = second.until(lambda got: not got.outputs)[-1]
    assert last.scheduler_stats is None


def test_the_scheduler_is_watched_until_the_last_watcher_leaves(pair: list[FrontEnd]) -> None:
    first, second = pair
    assert first.call(20, "watch_scheduler") and second.call(20, "watch_scheduler")
    assert first.call(21, "unwatch_scheduler")
    first.send(Kind.ADD, request("watched"))
    seen = second.until(lambda got: any(b"sched.finished" in event for event in got.trace_events))
    assert any(b'"watched"' in event for got in seen for event in got.trace_events)
    assert not any(
        got.trace_events for got in first.until(lambda got: any(o.finish_reason is not None for o in got.outputs))
    )
    assert second.call(21, "unwatch_scheduler")
    second.send(Kind.ADD, request("unwatched"))
    quiet = second.until(lambda got: any(output.finish_reason is not None for output in got.outputs))
    assert not any(got.trace_events for got in quiet)


def test_what_a_front_end_asked_for_is_aborted_when_it_is_gone(engine: tuple[EngineProcess, list[FrontEnd]]) -> None:
    first, gone = engine[1][0], engine[1][2]
    gone.send(Kind.ADD, request("orphan", 480))
    gone.until(lambda got: bool(got.outputs))
    gone.close()
    first.until(lambda got: got.scheduler_stats is not None and got.scheduler_stats.num_running == 0)
    first.send(Kind.ADD, request("after"))
    assert sum(len(output.new_token_ids) for output in first.answer("after")) == 8


def test_a_process_that_takes_the_place_of_another_gets_nothing_of_it() -> None:
    """Not even for a request with the same id: what the old one asked for is aborted, and what it had not read yet is dropped."""
    process = EngineProcess(CONFIG)
    old, other = FrontEnd(process, 1), FrontEnd(process, 2)
    kept = [old, other]
    try:
        process.shake_hands()
        old.wait_for_engine()
        other.wait_for_engine()
        alone = request("alone")
        other.send(Kind.ADD, alone)
        expected = [token for output in other.answer("alone") for token in output.new_token_ids]
        for generation in range(3):
            old.send(Kind.ADD, request("same", 480))
            old.send(Kind.ADD, request("waits", 480))
            old.until(lambda got: bool(got.outputs))  # outputs come meanwhile that it never reads
            old.close()
            new = FrontEnd(process, 1, f"again-{generation}")
            kept.append(new)
            new.wait_for_engine()
            new.send(Kind.ADD, request("same"))
            assert [token for output in new.answer("same") for token in output.new_token_ids] == expected
            old = new
        idle = other.until(lambda got: got.scheduler_stats is not None and got.scheduler_stats.num_running == 0)[-1]
        assert idle.scheduler_stats is not None and idle.scheduler_stats.num_waiting == 0
    finally:
        process.shutdown()
        for each in kept:
            each.close()


def test_every_front_end_hears_why_the_engine_dies() -> None:
    process = EngineProcess(CONFIG)
    front_ends = [FrontEnd(process, index) for index in range(3)]
    try:
        process.shake_hands()
        for each in front_ends:
            each.wait_for_engine()
        broken = request("broken")
        broken.prompt_token_ids = [10**9]  # no such row in the embedding
        front_ends[1].send(Kind.ADD, broken)
        for each in front_ends:
            with pytest.raises(EngineDeadError, match="The engine stopped: "):
                each.until(lambda got: False)
    finally:
        process.shutdown()
        for each in front_ends:
            each.close()
