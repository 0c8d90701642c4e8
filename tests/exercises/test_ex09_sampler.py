"""The judge of exercise 9: small rows of logits, against twins in plain Python; the noise is the project's, so that draws can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from hypothesis import assume, given, strategies as st
from judging import Judge
from torch import Tensor

from stage04_kernels.features.logits_processors import LogitsRules, Penalties
from stage04_kernels.lab import logits_reference, sampler_reference as twin
from stage04_kernels.sampler import SamplerOutput, SamplingMetadata, exponential_noise, sample as reference

judge = Judge(9)
CPU = torch.device("cpu")
CLOSE = 1e-4  # what float32 may decide either way is not asked

logits_of = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, -2.0]), min_size=4, max_size=4)
TOP_P = st.sampled_from([1.0, 0.45, 0.7, 0.95])
MIN_P = st.sampled_from([0.0, 0.1, 0.3, 1.0])
TOP_K = st.sampled_from([0, 1, 2, 3, 9, -1])


@dataclass(frozen=True)
class Row:
    """A request: its logits, and what it asks for."""

    logits: list[float]
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    position: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    def __repr__(self) -> str:
        default = Row(self.logits)
        set_ = {
            name: value for name, value in vars(self).items() if value != getattr(default, name) or name == "logits"
        }
        return "(" + ", ".join(f"{name} {list(v) if isinstance(v, tuple) else v}" for name, v in set_.items()) + ")"


def rows(drawn: bool = False, penalties: bool = False) -> Any:
    tokens = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    values: dict[str, Any] = {"logits": logits_of}
    if drawn:
        values |= {"temperature": st.sampled_from([1.0, 0.5, 2.0, 0.0]), "min_p": MIN_P, "top_k": TOP_K, "top_p": TOP_P,
                   "seed": st.integers(0, 9), "position": st.integers(0, 9)}  # fmt: skip
    if penalties:
        values |= {"prompt": tokens, "output": tokens, "repetition": st.sampled_from([1.0, 2.0]),
                   "frequency": st.sampled_from([0.0, 0.5]), "presence": st.sampled_from([0.0, 0.25])}  # fmt: skip
    return st.builds(Row, **values)


def called(function: Callable[..., Any], logits: list[list[float]], *arguments: Any) -> Any:
    """What the function makes of these logits; they must stay as they were. A tensor becomes a list."""
    given = torch.tensor(logits)
    before = given.clone()
    result = function(given, *arguments)
    judge.holds("kept", torch.equal(given, before), f"the given logits stay {before.tolist()}", f"now they are {given}")
    if isinstance(result, SamplerOutput):
        return result
    judge.holds("works", isinstance(result, Tensor), "a tensor", repr(result))
    return result.tolist()


def same(got: list[float], expected: list[float]) -> bool:
    """Equal but for rounding."""
    close = (math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4) for a, b in zip(got, expected))
    return len(got) == len(expected) and all(close)


# --- penalties ---------------------------------------------------------------------------------------------------------------------


def penalties_of(batch: list[Row]) -> Penalties:
    """Of these rows, which are 0, 1, ... of the logits."""
    counts = torch.tensor([[float(row.output.count(token)) for token in range(4)] for row in batch])
    in_prompt = torch.tensor([[token in row.prompt for token in range(4)] for row in batch])
    settings = [torch.tensor([getattr(row, name) for row in batch]) for name in ("repetition", "frequency", "presence")]
    return Penalties(torch.arange(len(batch)), in_prompt, counts, *settings)


def penalised(row: Row) -> list[float]:
    return logits_reference.penalties(
        row.logits, list(row.prompt), list(row.output), row.repetition, row.frequency, row.presence
    )


@judge.settings(100)
@given(row=rows(penalties=True))
def test_penalties(impl: ModuleType, row: Row) -> None:
    with judge.case(request=row):
        got = called(impl.apply_penalties, [row.logits], penalties_of([row]))[0]
        for token, (value, expected) in enumerate(zip(got, penalised(row))):
            if not same([value], [expected]):
                judge.rejects(broken_penalty(row, token), f"{expected} for token {token}", str(value))


def broken_penalty(row: Row, token: int) -> str:
    """The penalty that is most likely wrong: the only one that works on this token, or else the first of them."""
    seen = token in row.prompt or token in row.output
    if row.repetition != 1 and seen:
        return "repetition_seen" if row.logits[token] >= 0 else "repetition_sign"
    return "frequency" if row.frequency and (token in row.output or not row.presence) else "presence"


@judge.settings(25)
@given(first=rows(penalties=True), second=rows(penalties=True), other=logits_of)
def test_rows_beside_each_other(impl: ModuleType, first: Row, second: Row, other: list[float]) -> None:
    with judge.case(rows=[first, Row(other), second], penalties="in rows 0 and 2"):
        settings = replace(penalties_of([first, second]), rows=torch.tensor([0, 2]))
        got = called(impl.apply_penalties, [first.logits, other, second.logits], settings)
        expected = [penalised(first), other, penalised(second)]
        judge.holds("alone", all(map(same, got, expected)), expected, got)


# --- min-p, top-k, top-p -----------------------------------------------------------------------------------------------------------


@judge.settings(50)
@given(logits=logits_of, min_p=MIN_P)
def test_min_p(impl: ModuleType, logits: list[float], min_p: float) -> None:
    with judge.case(logits=logits, min_p=min_p):
        got = called(impl.apply_min_p, [logits, [0.0] * 4], torch.tensor([min_p, 0.0]))
        judge.holds("min_p", same(got[0], twin.min_p(logits, min_p)), twin.min_p(logits, min_p), got[0])
        judge.equal("min_p", [0.0] * 4, got[1])


@judge.settings(50)
@given(logits=logits_of, top_k=TOP_K)
def test_top_k(impl: ModuleType, logits: list[float], top_k: int) -> None:
    with judge.case(logits=logits, top_k=top_k):
        got = called(impl.apply_top_k, [logits, logits], torch.tensor([top_k, 2]))
        judge.equal("top_k", twin.top_k(logits, top_k), got[0])
        with judge.case(top_k=2):
            judge.equal("top_k", twin.top_k(logits, 2), got[1])


def masses(logits: list[float]) -> list[float]:
    """The probability of the likeliest token, of the two likeliest together, ..."""
    probs = twin.softmax(logits)
    order = twin.descending(logits)
    return [sum(probs[token] for token in order[: n + 1]) for n in range(len(order))]


def clear_top_p(logits: list[float], top_p: float) -> bool:
    """True unless rounding decides."""
    return top_p >= 1 or all(abs(mass - top_p) > CLOSE for mass in masses(logits))


@judge.settings(100)
@given(logits=logits_of, top_p=TOP_P)
def test_top_p(impl: ModuleType, logits: list[float], top_p: float) -> None:
    assume(clear_top_p(logits, top_p))
    with judge.case(logits=logits, top_p=top_p):
        off = [20.0, 0.0, -1.0, 0.0]  # its first token has all of the mass that float32 can show
        got = called(impl.apply_top_p, [logits, off], torch.tensor([top_p, 1.0]))
        expected = twin.top_p(logits, top_p)
        judge.holds("top_p", sorted(got[0]) == sorted(expected), expected, got[0])
        judge.equal("top_p_ties", expected, got[0])
        with judge.case(logits=off, top_p=1.0):
            judge.equal("top_p", off, got[1])


def test_top_p_that_is_reached_exactly(impl: ModuleType) -> None:
    never = -math.inf
    with judge.case(logits=[0.0, 0.0, never, never], top_p=0.5):
        judge.equal(
            "top_p",
            [0.0, never, never, never],
            called(impl.apply_top_p, [[0.0, 0.0, never, never]], torch.tensor([0.5]))[0],
        )


# --- the order, and the draw -------------------------------------------------------------------------------------------------------


def metadata_of(batch: list[Row], num_logprobs: int | None = None) -> SamplingMetadata:
    """The settings as the model runner hands them over."""
    lists = (
        [getattr(row, name) for row in batch] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    )
    rules = LogitsRules(penalties=penalties_of(batch)) if any(row.prompt or row.output for row in batch) else None
    return SamplingMetadata.from_lists(*lists, max_num_logprobs=num_logprobs, rules=rules)  # type: ignore[arg-type]


def transformed(row: Row) -> list[float]:
    """What the row draws from."""
    logits = twin.min_p(twin.temperature(penalised(row), row.temperature), row.min_p)
    logits = twin.top_k(logits, row.top_k)
    assume(clear_top_p(logits, row.top_p))
    return twin.top_p(logits, row.top_p)


@judge.settings(100)
@given(row=rows(drawn=True), greedy_first=st.booleans())
def test_order(impl: ModuleType, row: Row, greedy_first: bool) -> None:
    assume(row.temperature > 0)
    expected = transformed(row)
    with judge.case(request=row, in_row=int(greedy_first)):
        metadata = metadata_of([Row([0.0] * 4, temperature=0.0)] * greedy_first + [row])
        got = called(impl.transform_rows, [row.logits], torch.tensor([int(greedy_first)]), metadata)[0]
        judge.holds("order", same(got, expected), expected, got)


def arrivals(logits: list[float], seed: int, position: int) -> list[float]:
    """When each token arrives. Too close a finish is not asked."""
    noise = exponential_noise([seed], [position], len(logits), CPU)[0].tolist()
    times = [n / p if p > 0 else math.inf for n, p in zip(noise, twin.softmax(logits))]
    first, second = sorted(times)[:2]
    assume(second > first * (1 + CLOSE))
    return times


@judge.settings(30)
@given(batch=st.lists(rows(drawn=True), min_size=2, max_size=3))
def test_a_draw_alone_and_in_company(impl: ModuleType, batch: list[Row]) -> None:
    logits, seeds, positions = ([getattr(row, name) for row in batch] for name in ("logits", "seed", "position"))
    with judge.case(logits=logits, seeds=seeds, positions=positions):
        got = called(impl.sample_random, logits, seeds, positions)
        alone = [called(impl.sample_random, [row.logits], [row.seed], [row.position])[0] for row in batch]
        judge.holds("alone", got == alone, f"the tokens {alone}, as when each row is alone", f"{got}")


@judge.settings(40)
@given(row=rows(drawn=True))
def test_the_race(impl: ModuleType, row: Row) -> None:
    times = arrivals(row.logits, row.seed, row.position)
    with judge.case(
        logits=row.logits, seed=row.seed, position=row.position, arrivals=[round(time, 3) for time in times]
    ):
        got = called(impl.sample_random, [row.logits], [row.seed], [row.position])
        judge.equal("race", [times.index(min(times))], got)
        judge.holds("works", isinstance(got[0], int), "int64", f"{got}")


# --- all of it ---------------------------------------------------------------------------------------------------------------------


@judge.settings(50)
@given(batch=st.lists(rows(drawn=True, penalties=True), min_size=1, max_size=3))
def test_sample(impl: ModuleType, batch: list[Row]) -> None:
    for row in batch:
        if row.temperature:
            arrivals(transformed(row), row.seed, row.position)
    logits = [row.logits for row in batch]
    with judge.case(requests=batch):
        got = called(impl.sample, logits, metadata_of(batch))
        judge.holds("works", isinstance(got, SamplerOutput), "a SamplerOutput", repr(got))
        expected = reference(torch.tensor(logits), metadata_of(batch))
        for row, (token, right) in enumerate(zip(got.sampled_token_ids.tolist(), expected.sampled_token_ids.tolist())):
            key = "order" if batch[row].temperature else "greedy"
            judge.holds(key, token == right, f"token {right} in row {row}", f"token {token}")


@judge.settings(30)
@given(row=rows(penalties=True), company=st.booleans())
def test_a_greedy_row_for_which_the_rules_decide(impl: ModuleType, row: Row, company: bool) -> None:
    expected = penalised(row)
    largest = expected.index(max(expected))
    assume(row.logits[largest] < max(row.logits) and sorted(expected)[-2] < max(expected) - CLOSE)
    batch = [replace(row, temperature=0.0)] + [Row([0.0] * 4)] * company
    with judge.case(requests=batch, after_the_rules=expected):
        got = called(impl.sample, [each.logits for each in batch], metadata_of(batch))
        judge.equal("greedy", largest, got.sampled_token_ids.tolist()[0])


@judge.settings(15)
@given(row=rows(penalties=True), num_logprobs=st.sampled_from([0, 2]))
def test_logprobs(impl: ModuleType, row: Row, num_logprobs: int) -> None:
    batch = [replace(row, temperature=0.0)]
    with judge.case(request=row, logprobs=num_logprobs):
        got = called(impl.sample, [row.logits], metadata_of(batch, num_logprobs))
        check_logprobs(got, reference(torch.tensor([row.logits]), metadata_of(batch, num_logprobs)))


@judge.settings(30)
@given(
    row=rows(penalties=True), where=st.sampled_from(["before", "after_temperature"]), other=st.booleans(), greedy=st.booleans()
)  # fmt: skip
def test_users_own_processors(impl: ModuleType, row: Row, where: str, other: bool, greedy: bool) -> None:
    """One that leaves a single token, in the rows that it is given."""
    batch = [Row([0.0] * 4, temperature=0.0)] * other + [replace(row, temperature=0.0 if greedy else 2.0)]
    seen = range(len(batch)) if where == "before" else [number for number, each in enumerate(batch) if each.temperature]
    shown = [penalised(batch[number]) for number in seen]
    if where == "after_temperature":
        shown = [twin.temperature(logits, 2.0) for logits in shown]
    asked = []

    def own(given: Tensor, rows: list[int]) -> Tensor:
        judge.equal("own", [*seen], rows)
        judge.holds("own", all(map(same, given.tolist(), shown)), f"it is shown {shown}", given.tolist())
        asked.append(rows)
        return given.masked_fill(torch.tensor([False, True, True, True]), -torch.inf)

    with judge.case(requests=batch, processor=where):
        metadata = replace(metadata_of(batch, 2), named={int(other): [3, 1]}, **{where: [own]})  # type: ignore[arg-type]
        got = called(impl.sample, [each.logits for each in batch], metadata)
        if seen:
            judge.equal("own", [[*seen]], asked)
        if where == "before" or not greedy:
            judge.equal("own", 0, got.sampled_token_ids.tolist()[-1])
        asked.clear()
        check_logprobs(got, reference(torch.tensor([each.logits for each in batch]), metadata))


def check_logprobs(got: SamplerOutput, expected: SamplerOutput) -> None:
    names = ("logprob_token_ids", "logprobs", "ranks")
    values = [
        [None if (x := getattr(each, name)) is None else x.tolist() for name in names] for each in (expected, got)
    ]
    close = values[1][1] is not None and all(same(a, b) for a, b in zip(values[1][1], values[0][1], strict=True))
    judge.holds("logprobs", close and values[0][::2] == values[1][::2], *(dict(zip(names, each)) for each in values))
