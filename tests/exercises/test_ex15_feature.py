"""The judge of exercise 15: the processor on small tensors, and the route in an application with the echo engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import given, strategies as st
from judging import Judge
from server_under_test import InProcessServer
from work import Work, counted_numbers

from stage03_engine import plugins
from stage03_engine.core.features.logits_processor.logits_processor import LogitsRow
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.sampling_params import SamplingParams

judge = Judge(15)
VOCABULARY = 6
TOKENS = st.lists(st.integers(0, 2), max_size=6)
Asked = tuple[Any, list[int], list[int]]  # no_repeat_ngram, prompt, output


@judge.settings(100)
@given(tokens=TOKENS, n=st.integers(1, 4))
def test_what_is_forbidden(impl: ModuleType, tokens: list[int], n: int) -> None:
    with judge.case(call=f"forbidden({tokens}, {n})"):
        judge.equal("forbids", naive(tokens, n), impl.forbidden(list(tokens), n))


def naive(tokens: list[int], n: int) -> set[int]:
    runs = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    return {token for token in set(tokens) if [*tokens, token][-n:] in runs and len(tokens) >= n - 1}


def test_greedy_requests_obey(impl: ModuleType) -> None:
    with judge.case(call="is_argmax_invariant()"):
        judge.equal("greedy", False, processor(impl).is_argmax_invariant())


def processor(impl: ModuleType) -> Any:
    return impl.NoRepeatNgram(None, torch.device("cpu"))


@judge.settings(80)
@given(n=st.integers(1, 3), prompt=TOKENS, output=TOKENS)
def test_a_row(impl: ModuleType, n: int, prompt: list[int], output: list[int]) -> None:
    asked = [(n, prompt, output)]
    with judge.case(row=shown(asked)):
        [got] = applied(processor(impl), asked)
        banned = [token for token, logit in enumerate(got) if logit == float("-inf")]
        half = naive(output, n) if naive(output, n) != naive(prompt + output, n) else None
        key = "whole" if half is not None and set(banned) == half else "minus_inf"
        judge.equal(key, right(asked[0]), got)


@judge.settings(60)
@given(asked=st.lists(st.tuples(st.sampled_from([None, 1, 2, 3]), TOKENS, TOKENS), min_size=2, max_size=3))
def test_rows_beside_each_other(impl: ModuleType, asked: list[Asked]) -> None:
    one = processor(impl)
    with judge.case(rows=shown(asked)):
        judge.equal("own_row", [right(each) for each in asked], applied(one, asked))
    longer = [(n, prompt, [*output, 2]) for n, prompt, output in reversed(asked)]
    with judge.case(then=shown(longer)):
        judge.equal("own_row", [right(each) for each in longer], applied(one, longer))


def test_other_values_change_nothing(impl: ModuleType) -> None:
    for value in (0, -1, True, 2.0, "2", [2], "two"):
        asked = [(value, [1, 1, 2], [1])]
        with judge.case(row=shown(asked)):
            try:
                [got] = applied(processor(impl), asked)
            except NotImplementedError:
                raise
            except Exception as error:
                judge.rejects("ignored", right((None, [], [])), f"{type(error).__name__}: {error}", error)
            judge.equal("ignored", right((None, [], [])), got)


def test_there_is_always_a_token(impl: ModuleType) -> None:
    asked = [(1, [0, 1, 2, 3], [5, 4])]
    with judge.case(row=shown(asked)):
        judge.equal("way_out", right((None, [], [])), applied(processor(impl), asked)[0])


def shown(asked: list[Asked]) -> str:
    rows = [
        f"prompt {prompt}, output {output}, " + (f"no_repeat_ngram {n!r}" if n is not None else "no vllm_xargs")
        for n, prompt, output in asked
    ]
    return "; ".join(rows)


def applied(one: Any, asked: list[Asked]) -> list[list[float]]:
    """What the processor makes of logits 0, 1, 2, ... in each row."""
    rows = [
        LogitsRow(
            f"r{number}-{len(prompt)}", SamplingParams(extra_args={} if n is None else {"no_repeat_ngram": n}),
            np.array(prompt, np.int64), np.array(output, np.int64),
        )
        for number, (n, prompt, output) in enumerate(asked)
    ]  # fmt: skip
    got = one.apply(torch.arange(VOCABULARY, dtype=torch.float32).repeat(len(rows), 1), rows)
    shape = list(got.shape) if isinstance(got, torch.Tensor) else got
    judge.equal("minus_inf", f"logits of shape {[len(rows), VOCABULARY]}", f"logits of shape {shape}")
    values: list[list[float]] = got.tolist()
    return values


def right(asked: Asked) -> list[float]:
    n, prompt, output = asked
    banned = naive(prompt + output, n) if n else set()
    return [float("-inf") if token in banned else float(token) for token in range(VOCABULARY)]


SHORT, LONG = 100, 400  # tokens
MOST = 6  # times the work for four times the tokens: the square would be sixteen times


def test_a_long_text_costs_no_more_for_each_token(impl: ModuleType) -> None:
    for n in (1, 2, 4):
        with judge.case(call=f"forbidden(tokens, {n})", tokens=f"{SHORT}, then {LONG}"):
            check_linear([work_of_forbidden(impl, number, n) for number in (SHORT, LONG)])


def work_of_forbidden(impl: ModuleType, number: int, n: int) -> int:
    work = Work()
    tokens = counted_numbers(work, [i % (number // 2) for i in range(number)])
    with work.of(impl.forbidden):
        impl.forbidden(tokens, n)
    return work.done


def check_linear(done: list[int]) -> None:
    few, many = done
    judge.holds("linear", many <= MOST * max(few, SHORT), f"four times the tokens: at most {MOST} times the work",
                f"{many / few:.0f} times: {few} lines and comparisons, then {many}")  # fmt: skip


TEXTS = [("abab", 2), ("abc", 2), ("aaaa", 1), ("a b a b", 3), ("", 1), ("a", 2), ("äß", 1)]


def test_the_route(impl: ModuleType) -> None:
    with served(impl) as server:
        for text, n in TEXTS:
            with judge.case(body=f"prompt {text!r}, ngram {n}"):
                tokens = list(text.encode())  # the stand-in tokenizer has one token per byte
                runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
                expected = {"object": "repetition", "num_tokens": len(tokens), "ngram": n}
                answer = server.post("/v1/repetition", {"prompt": text, "ngram": n})
                judge.equal("route", f"status 200, {expected | {'repeats': len(runs) - len(set(runs))}}",
                            f"status {answer.status_code}, {answer.json()}")  # fmt: skip


def test_a_long_text_costs_the_route_no_more_for_each_token(impl: ModuleType) -> None:
    with served(impl) as server, judge.case(body="a prompt of 100 tokens, then of 400; ngram 2"):
        check_linear([work_of_route(impl, server, number) for number in (SHORT, LONG)])


def work_of_route(impl: ModuleType, server: InProcessServer, number: int) -> int:
    """The tokens are pairs that do not repeat, so that nobody finds one at once."""
    work, text = Work(), "".join(chr(97 + i % 26) + chr(97 + i // 26) for i in range(number // 2))
    encode = Tokenizer.encode

    def counted(self: Tokenizer, *given: Any) -> list[int]:
        return counted_numbers(work, encode(self, *given))

    with mock.patch.object(Tokenizer, "encode", counted):
        answer = server.post("/v1/repetition", {"prompt": text, "ngram": 2})
    judge.equal("route", 200, answer.status_code)
    return work.done


def test_what_the_route_refuses(impl: ModuleType) -> None:
    bodies = {
        404: [{"prompt": "a", "ngram": 1, "model": "another"}],
        400: [{}, {"prompt": 1, "ngram": 1}, {"prompt": "a", "ngram": 0}, {"prompt": "a", "ngram": "2"}],
    }
    with served(impl) as server:
        for status, wrong in bodies.items():
            for body in wrong:
                with judge.case(body=body):
                    answer = server.post("/v1/repetition", body)
                    judge.equal("refuses", f"status {status}", f"status {answer.status_code}")
                    judge.equal(
                        "refuses", f"an error with code {status}", f"an error with code {code_of(answer.json())}"
                    )


def code_of(answer: Any) -> Any:
    return answer.get("error", {}).get("code") if isinstance(answer, dict) else None


def test_the_other_routes_are_still_there(impl: ModuleType) -> None:
    with served(impl) as server:
        for method, path, body in (
            ("POST", "/tokenize", {"prompt": "ab"}),
            ("GET", "/v1/models", None),
            ("GET", "/metrics", None),
        ):
            with judge.case(request=f"{method} {path}"):
                answer = server.request(method, path, json=body)
                judge.equal("beside", "status 200", f"status {answer.status_code}")


@contextmanager
def served(impl: ModuleType) -> Iterator[InProcessServer]:
    """An application with the solution's index of features."""
    theirs, plugins.INDEX = plugins.INDEX, impl.INDEX
    try:
        server = InProcessServer()
    finally:
        plugins.INDEX = theirs
    try:
        yield server
    finally:
        server.close()
