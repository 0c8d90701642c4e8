"""The judge of exercise 10: requests whose tokens are letters, step by step, beside the reference; and a collector whose reader is slow."""

from __future__ import annotations

import asyncio
import math
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import example, given, strategies as st
from judging import Judge

from stage02_server.features.logprobs.answer import add_token
from stage02_server.features.logprobs.fields import CompletionLogProbs
from stage03_engine.frontend.metrics import CompletedStats, IterationStats
from stage03_engine.frontend.output_processor import OutputEnd, OutputProcessor, RequestState
from stage03_engine.frontend.tokenizer import ByteLevelStream
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import trace

judge = Judge(10)
LETTERS = [b"a", b"b", b"c", b"\xc3", b"\xa9"]  # the last two are the halves of é
NAMES = ["a", "b", "c", "é1", "é2"]
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


class Letters:
    """As much of a tokenizer as the output processor needs."""

    makes_text = True

    def stream(self, after: list[int], skip_special_tokens: bool = True) -> ByteLevelStream:
        return ByteLevelStream()

    def piece(self, token_id: int) -> tuple[str, bytes]:
        return NAMES[token_id], LETTERS[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


@dataclass(frozen=True)
class Answer:
    """What a request asks for, and the tokens that each step of the engine gives it. `ends`: so the engine ends it with the last."""

    steps: tuple[tuple[int, ...], ...]
    kind: RequestOutputKind = DELTA
    stop: tuple[str, ...] = ()
    logprobs: bool = True
    interval: int = 1
    ends: FinishReason | None = FinishReason.LENGTH
    by_grammar: bool = False

    def __repr__(self) -> str:
        steps = ", ".join("[" + " ".join(NAMES[token] for token in step) + "]" for step in self.steps)
        extra = [f"stop {list(self.stop)}"] * bool(self.stop) + [f"stream_interval {self.interval}"] * (
            self.interval > 1
        )
        extra += ["no logprobs"] * (not self.logprobs)
        end = (
            "the engine goes on" if self.ends is None else f"ends by {self.ends}{', ends_with_text' * self.by_grammar}"
        )
        return f"{self.kind.name}, steps {steps}; {', '.join([*extra, end])}"

    def request(self, name: str) -> EngineCoreRequest:
        params = SamplingParams(
            output_kind=self.kind, stop=list(self.stop), logprobs=0 if self.logprobs else None,
            stream_interval=self.interval, max_tokens=99,
        )  # fmt: skip
        return EngineCoreRequest(name, [0, 1], params)

    def outputs(self, name: str) -> list[EngineCoreOutput]:
        """What the engine sends, step by step."""
        made, number = [], 0
        for i, step in enumerate(self.steps):
            numbers = range(number, number + len(step))
            number += len(step)
            likely = [TokenLogprobs([token], [-(n + 1) / 4], 1) for n, token in zip(numbers, step)]
            reason = self.ends if i == len(self.steps) - 1 else None
            output = EngineCoreOutput(name, list(step), likely if self.logprobs else None, reason)
            output.num_cached_tokens, output.result = i, {"step": i + 1}
            output.ends_with_text = self.by_grammar and reason == FinishReason.STOP
            made.append(output)
        return made


steps = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5).map(tuple)
stops = st.sampled_from([(), (), ("b",), ("bc",), ("ab", "c")])


def answers(*kinds: RequestOutputKind) -> Any:
    return st.builds(
        Answer, steps, st.sampled_from(kinds), stops, st.booleans(), st.sampled_from([1, 1, 3]),
        st.sampled_from([FinishReason.LENGTH, FinishReason.STOP, None]), st.booleans(),
    )  # fmt: skip


class Shown(NamedTuple):
    """Of a RequestOutput what is compared."""

    text: str
    tokens: list[str]
    logprobs: list[float] | None
    sum: float | None
    finish_reason: str | None
    stop_reason: int | str | None
    finished: bool
    with_stats: bool
    cached_tokens: int
    result: dict[str, int] | None
    of: tuple[Any, ...]


def shown(output: RequestOutput | None) -> Shown | None:
    """None stays None."""
    if output is None:
        return None
    judge.holds("works", len(output.outputs) == 1, "one answer", f"{len(output.outputs)}")
    [answer] = output.outputs
    logprobs = None if answer.logprobs is None else [each.logprobs[0] for each in answer.logprobs]
    tokens = [NAMES[token] for token in answer.token_ids]
    return Shown(
        answer.text, tokens, logprobs, answer.cumulative_logprob, answer.finish_reason, answer.stop_reason, output.finished,
        answer.stats is not None, output.num_cached_tokens, output.result,
        (output.request_id, output.prompt, output.prompt_token_ids, answer.index),
    )  # fmt: skip


# --- log-probabilities in OpenAI's form --------------------------------------------------------------------------------------------


@judge.settings(60)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4), lowest=st.sampled_from([-0.5, -math.inf]),
    num_top=st.integers(0, 3), as_ids=st.booleans(),
)  # fmt: skip
def test_add_token(impl: ModuleType, tokens: list[int], lowest: float, num_top: int, as_ids: bool) -> None:
    position = TokenLogprobs(tokens, [lowest - token for token in tokens], 1)
    texts = {token: ["x", "y", "x", ""][token] for token in tokens}
    with judge.case(token_ids=tokens, logprobs=position.logprobs, texts=texts, num_top=num_top, as_ids=as_ids):
        results = CompletionLogProbs(), CompletionLogProbs()
        for function, result in zip((add_token, impl.add_token), results):
            for offset in (0, 3):
                function(result, dict(texts), deepcopy(position), num_top, offset, as_ids)
        right, got = (result.model_dump() for result in results)
        numbers = [*got["token_logprobs"], *(value for each in got["top_logprobs"] for value in each.values())]
        judge.holds(
            "finite", all(number >= -9999.0 for number in numbers), "at least -9999.0", f"{min(numbers, default=0)}"
        )
        judge.equal("lists", right, got)


# --- the state of a request --------------------------------------------------------------------------------------------------------


def state_of(state_class: Any, answer: Answer) -> Any:
    return state_class(answer.request("r"), "?", Letters(), None, "r", CompletedStats(1, None))


def step(state: Any, output: EngineCoreOutput) -> tuple[OutputEnd | None, RequestOutput | None]:
    """What the processor does with one output."""
    end = state.append(deepcopy(output))
    reason, stop = (end.finish_reason, end.stop_reason) if end else (output.finish_reason, output.stop_reason)
    if reason is not None:
        state.detokenizer.finish()
    return end, state.make_output(reason, stop)


@judge.settings(100)
@given(answer=answers(DELTA))
def test_append(impl: ModuleType, answer: Answer) -> None:
    own, reference = state_of(impl.RequestState, answer), state_of(RequestState, answer)
    with judge.case(request=answer):
        for number, output in enumerate(answer.outputs("r"), start=1):
            with judge.case(step=number):
                end, right = own.append(deepcopy(output)), reference.append(output)
                expected, got = ([NAMES[token] for token in state.token_ids] for state in (reference, own))
                judge.equal("counted", f"tokens {expected}", f"tokens {got}")
                judge.equal("counted", reference.logprobs, own.logprobs)
                judge.equal("ends", right, end)
                newest = [
                    {"num_cached_tokens": each.num_cached_tokens, "result": each.result} for each in (reference, own)
                ]
                judge.equal("newest", *newest)
                judge.equal("sum", reference.cumulative_logprob, own.cumulative_logprob)
                if right or output.finish_reason is not None:
                    return


def run(state: Any, answer: Answer) -> list[Shown | None]:
    """The output of each step, up to the end."""
    made: list[Shown | None] = []
    for output in answer.outputs("r"):
        made.append(shown(step(state, output)[1]))
        if made[-1] is not None and made[-1].finished:
            break
    return made


@judge.settings(60)
@given(answer=answers(FINAL_ONLY, CUMULATIVE))
def test_whole_outputs(impl: ModuleType, answer: Answer) -> None:
    with judge.case(request=answer):
        right, got = run(state_of(RequestState, answer), answer), run(state_of(impl.RequestState, answer), answer)
        check_when(answer, right, got)
        check_what("cumulative", right, got)


def check_when(answer: Answer, right: list[Any], got: list[Any]) -> None:
    """Does an output come in the right steps?"""
    key = "final_only" if answer.kind == FINAL_ONLY else "interval" if answer.interval > 1 else "waits"
    came = [
        [number for number, output in enumerate(outputs, start=1) if output is not None] for outputs in (right, got)
    ]
    judge.equal(key, f"outputs in the steps {came[0]}", f"outputs in the steps {came[1]}")


def check_what(key: str, right: list[Any], got: list[Any]) -> None:
    """The first output that differs, and only what differs."""
    for number, (expected, own) in enumerate(zip(right, got), start=1):
        if expected != own:
            names = [name for name in Shown._fields if getattr(expected, name) != getattr(own, name)]
            with judge.case(step=number, text=repr(expected.text)):
                judge.equal(key, *({name: getattr(each, name) for name in names} for each in (expected, own)))


@judge.settings(100)
@given(answer=answers(DELTA))
def test_deltas(impl: ModuleType, answer: Answer) -> None:
    with judge.case(request=answer):
        right, got = run(state_of(RequestState, answer), answer), run(state_of(impl.RequestState, answer), answer)
        check_when(answer, right, got)
        check_what("together", right, got)


# --- a step of several requests ----------------------------------------------------------------------------------------------------


class Queue:
    """Where the outputs of a request go."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, output: RequestOutput | Exception) -> None:
        self.got.append(f"{type(output).__name__}: {output}" if isinstance(output, Exception) else shown(output))


@judge.settings(60)
@given(
    pair=st.tuples(answers(DELTA, CUMULATIVE), answers(DELTA)), without_queue=st.booleans(), leaves=st.sampled_from([0, 0, 2]),
    refused=st.sampled_from(["", "", "too long", "prompt: too long", "prompt: too busy"]),
)  # fmt: skip
@example(pair=(Answer(((0, 1),), stop=("b",)), Answer(((0,),))), without_queue=False, leaves=0, refused="")
@example(pair=(Answer(((0,),)), Answer(((0,),))), without_queue=False, leaves=0, refused="prompt: too busy")
def test_process_outputs(
    impl: ModuleType, pair: tuple[Answer, Answer], without_queue: bool, leaves: int, refused: str
) -> None:
    requests = dict(zip("ab", pair))
    with judge.case(**requests, a_leaves_before_step=leaves or "never", a_is_refused=refused or "no"):
        sides = [Side(kind, requests, without_queue) for kind in (OutputProcessor, impl.OutputProcessor)]
        for number in range(max(len(answer.steps) for answer in pair)):
            outputs = [each[number] for name in "ab" if number < len(each := requests[name].outputs(name))]
            if refused and not number:
                *param, error = refused.split(": ")
                outputs[0] = EngineCoreOutput("a", [], None, FinishReason.ERROR, error=error)
                outputs[0].error_param, outputs[0].busy = param[0] if param else None, "busy" in error
            with judge.case(step=number + 1):
                right, got = (side.step(outputs, number + 1 == leaves) for side in sides)
                judge.equal("abort", *(f"abort {each.pop('abort')}" for each in (right, got)))
                counted = [each.pop("counted") for each in (right, got)]
                judge.equal("own_queue", different(right, got), different(got, right))
                with judge.case(counted_in_stats="(tokens, finished requests)"):
                    judge.equal("works", *counted)


class Side:
    """A processor with its requests."""

    def __init__(self, kind: Any, requests: dict[str, Answer], without_queue: bool) -> None:
        self.processor = kind(Letters())
        self.queues = {name: Queue() for name in requests}
        for name, answer in requests.items():
            queue = None if without_queue and name == "b" else self.queues[name]
            self.processor.add_request(answer.request(name), "?", queue)

    def step(self, outputs: list[EngineCoreOutput], leaves: bool) -> dict[str, Any]:
        """What was returned, whom to abort, who still runs, what each caller got so far, and what was counted."""
        if leaves:
            self.processor.abort_requests(["a"])
        stats = IterationStats(now=1.0)
        made, aborted = self.processor.process_outputs(deepcopy(outputs), stats)
        numbers = stats.num_generation_tokens, len(stats.finished)
        queues = {f"{name} got": list(queue.got) for name, queue in self.queues.items()}
        returned, running = [shown(each) for each in made], sorted(self.processor.request_states)
        return {"abort": aborted, "returned": returned, "still running": running, **queues, "counted": numbers}


def different(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of one only what the other does not say."""
    return {name: value for name, value in one.items() if value != other[name]}


# --- the reader is slow ------------------------------------------------------------------------------------------------------------


def piece(number: int, index: int, finished: bool, asked: bool = True) -> RequestOutput:
    """A delta of an answer; with log-probabilities if somebody asked."""
    tokens = [TokenLogprobs([number], [-1.0], 1)] if asked else None
    stats: Any = f"of {number}"
    end = ("length", "stop") if finished else (None, None)
    answer = CompletionOutput(index, f"<{number}>", [number], tokens, *end, -1.0 * number, stats)
    prompt_logprobs: Any = [None] * number if number % 2 else None
    return RequestOutput("r", "?", [1], [answer], finished, prompt_logprobs, 0, {"n": number} if number == 2 else None)


def seen(output: RequestOutput) -> dict[str, Any]:
    """In words."""
    if not isinstance(output, RequestOutput):
        return {"no output, but": repr(output)}
    answers_ = {
        each.index: (
            each.text,
            each.token_ids,
            each.logprobs and [n.token_ids[0] for n in each.logprobs],
            each.finish_reason,
            each.stop_reason,
            each.cumulative_logprob,
            each.stats,
        )
        for each in output.outputs
    }
    return {
        "answers": answers_,
        "finished": output.finished,
        "prompt_logprobs": output.prompt_logprobs,
        "result": output.result,
    }


TURNS = 5  # of the event loop: so many are enough for whoever is not stuck


def fetched(collector: Any) -> RequestOutput:
    """What get gives, now that something is there."""

    async def work() -> RequestOutput:
        waiting = asyncio.ensure_future(collector.get())
        for _ in range(TURNS):
            await asyncio.sleep(0)
        judge.holds("wakes", waiting.done() or not waiting.cancel(), "get returns what was put", "it waits")
        return await waiting

    return asyncio.run(work())


@judge.settings(40)
@given(
    indices=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    kind=st.sampled_from([DELTA, CUMULATIVE]),
    asked=st.booleans(),
)
def test_merged(impl: ModuleType, indices: list[int], kind: RequestOutputKind, asked: bool) -> None:
    pieces = [piece(number, index, number == len(indices), asked) for number, index in enumerate(indices, start=1)]
    with judge.case(
        kind=kind.name, logprobs=asked, put=[f"answer {index}: <{n}>" for n, index in enumerate(indices, start=1)]
    ):
        collector = impl.RequestOutputCollector(kind)
        for each in pieces:
            collector.put(deepcopy(each))
        right = deepcopy(pieces[0])
        for each in pieces[1:]:
            right.add(deepcopy(each), kind == DELTA)
        judge.equal("merged", seen(right), seen(fetched(collector)))


@judge.settings(20)
@given(
    what=st.lists(st.sampled_from(["output", "exception"]), min_size=1, max_size=3).filter(
        lambda each: "exception" in each
    )
)
def test_exceptions(impl: ModuleType, what: list[str]) -> None:
    with judge.case(put=what):
        collector, number = impl.RequestOutputCollector(DELTA), 0
        for number, each in enumerate(what):
            collector.put(piece(number, 0, False) if each == "output" else KeyError(number))
        first = what.index("exception")
        try:
            got: Any = fetched(collector)
        except KeyError as error:
            judge.equal(
                "exception",
                f"the exception that was put as number {first}",
                f"the exception that was put as number {error}",
            )
        else:
            judge.rejects("exception", "the exception", seen(got))


@judge.settings(6)
@given(rounds=st.integers(1, 3))
def test_waiting(impl: ModuleType, rounds: int) -> None:
    async def work() -> None:
        collector = impl.RequestOutputCollector(DELTA)
        for number in range(rounds):
            waiting = asyncio.ensure_future(collector.get())
            try:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                    judge.holds(
                        "wakes",
                        not waiting.done(),
                        f"round {number + 1} waits",
                        "get has returned before anything was put",
                    )
                collector.put(piece(number, 0, False))
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                judge.holds("wakes", waiting.done(), "get returns after put", "it still waits")
                judge.equal("wakes", f"<{number}>", waiting.result().outputs[0].text)
            finally:
                waiting.cancel()

    with judge.case(rounds=rounds):
        asyncio.run(work())


def test_an_exception_wakes_whoever_waits(impl: ModuleType) -> None:
    async def work() -> None:
        collector = impl.RequestOutputCollector(DELTA)
        waiting = asyncio.ensure_future(collector.get())
        try:
            await asyncio.sleep(0)
            collector.put(KeyError("the engine is dead"))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            judge.holds("exception", waiting.done(), "a get that waits already raises it", "it still waits")
            judge.holds("exception", isinstance(waiting.exception(), KeyError), "get raises it", waiting.exception())
        finally:
            waiting.cancel()

    with judge.case(put="an exception, while get waits"):
        asyncio.run(work())


def test_the_trace(impl: ModuleType) -> None:
    heard: list[str] = []
    answer = Answer(((0,), (1,)), stop=("bc",))
    trace.watch(lambda event: heard.append(event.name), ["request.detokenized", "request.collected"])
    try:
        with judge.case(request=answer):
            state, collector = state_of(impl.RequestState, answer), impl.RequestOutputCollector(DELTA)
            for output in answer.outputs("r"):
                collector.put(step(state, output)[1])
    finally:
        trace.watch(None)
    judge.equal("told", ["request.detokenized", "request.collected"] * 2, heard)
