"""The judge of exercise 16: an engine over a very small GPT-2 with random weights, which a plain model follows token by token.

A token counts as the likeliest if the plain model gives it as much as any other, within the rounding of float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from engine_load import EOS, Clock, Model, Request, folder_of, held, likeliest, logits_of
from judging import Judge

judge = Judge(16)

MODEL = Model()
PROMPTS = [[3], [0], [1, 2], [7, 7, 7], [9, 9, 4, 11, 0], [5, 1, 8, 2, 23, 17, 3, 3, 12]]
OTHER = Model(seed=1, layers=3, heads=4, hidden=24, vocab=40, context=32)
CLOSE = 1e-3  # between two logits: whichever is taken, it is the likeliest


def make(impl: ModuleType, model: Model = MODEL) -> Clock:
    """The engine under a clock."""
    return Clock(impl.Engine(folder_of(model)))


def step(clock: Clock, key: str = "new") -> dict[str, list[int]]:
    """One step, which must return what a step returns."""
    new: Any = clock.step()
    good = isinstance(new, dict) and all(isinstance(tokens, list) for tokens in new.values())
    judge.holds(key, good, "a dict of lists of token ids", f"{new!r}")
    return new  # type: ignore[no-any-return]


def alone(impl: ModuleType, request: Request, model: Model = MODEL) -> list[int]:
    """A request's answer from an engine that it has to itself, with everything checked that comes of one request."""
    clock = make(impl, model)
    clock.add(request)
    patience = 100 + 4 * (len(request.prompt_token_ids) + request.max_tokens)
    came: list[int] = []
    while not clock.ended(request.request_id) and clock.steps < patience:
        new = step(clock)
        judge.holds("new", set(new) <= {request.request_id}, f"tokens of {request.request_id}", f"those of {[*new]}")
        tokens = new.get(request.request_id, [])
        repeats = bool(came) and tokens[: len(came)] == came and len(tokens) > len(came)
        judge.holds("new", not repeats, f"after {came}, the token that follows", f"all of them: {tokens}")
        came += tokens
    most = f"{request.max_tokens} tokens, or the end-of-text token"
    key = "eos" if request.eos_token_id is not None or came[-1:] == [EOS] else "length"
    judge.holds(key, clock.ended(request.request_id), most, f"after {clock.steps} steps only the tokens {came}")
    check_end(clock, request)
    return clock.came[request.request_id]


def check_end(clock: Clock, request: Request) -> None:
    """Nothing comes after the end, nor before it."""
    for _ in range(3):
        step(clock, "idle")
    came = clock.came[request.request_id]
    if request.eos_token_id is not None and request.eos_token_id in came:
        end = came.index(request.eos_token_id) + 1
        judge.equal("eos", came[:end], came)
    most = request.max_tokens
    judge.holds("length", len(came) <= most, f"{most} tokens", f"{len(came)} tokens: {came}")


def check_greedy(key: str, model: Model, request: Request, came: list[int]) -> None:
    """Each token is the likeliest after those before it."""
    prompt = request.prompt_token_ids
    logits = logits_of(model, [*prompt, *came[:-1]])[len(prompt) - 1 :]
    for number, (token, row) in enumerate(zip(came, logits)):
        good = token in range(model.vocab) and bool(row[token] >= row.max() - CLOSE)
        before = f"after {came[:number]}" if number else "first"
        judge.holds(key, good, f"{before}: token {int(row.argmax())}", f"{before}: token {token}")


def test_one_request(impl: ModuleType) -> None:
    for prompt in PROMPTS:
        for count in (1, 2, 6):
            request = Request("a", prompt, count)
            with judge.case(model=MODEL, request=request):
                check_greedy("greedy", MODEL, request, alone(impl, request))


def test_a_whole_context(impl: ModuleType) -> None:
    """The longest prompt, and the longest answer."""
    for prompt in ([3], [*range(20)] * 2, [5] * (MODEL.context - 1)):
        request = Request("a", prompt, MODEL.context - len(prompt))
        with judge.case(model=MODEL, request=request, context=MODEL.context):
            check_greedy("greedy", MODEL, request, alone(impl, request))


def test_an_end_before_the_last_token(impl: ModuleType) -> None:
    """Also where the token stands in the prompt, which ends nothing."""
    for prompt in PROMPTS:
        right = likeliest(MODEL, prompt, 6)
        for eos in dict.fromkeys(right):
            request = Request("a", prompt, 6, eos_token_id=eos)
            with judge.case(model=MODEL, request=request):
                end = right.index(eos) + 1
                got = alone(impl, request)
                judge.equal("eos", right[:end], got)


def test_no_end_where_none_is_named(impl: ModuleType) -> None:
    """config.json has an eos_token_id, too: the request decides."""
    prompt = [3, 7]
    right = likeliest(MODEL, prompt, 12)
    assert EOS in right[:-1]
    with judge.case(model=MODEL, request=Request("a", prompt, 12), answer=right):
        clock = make(impl)
        clock.add(Request("a", prompt, 12))
        left = clock.run("a")
        judge.holds("eos", not left, "12 tokens", f"{len(clock.came['a'])} tokens: {clock.came['a']}")


def test_another_model(impl: ModuleType) -> None:
    request = Request("a", [1, 39, 7, 30], 6)
    with judge.case(model=OTHER, request=request):
        try:
            got = alone(impl, request, OTHER)
        except (RuntimeError, IndexError, ValueError, KeyError) as error:
            judge.rejects("config", likeliest(OTHER, [1, 39, 7, 30], 6), f"{type(error).__name__}: {error}", error)
        check_greedy("config", OTHER, request, got)


def test_many_at_once(impl: ModuleType) -> None:
    requests = [Request(f"r{i}", [i % MODEL.vocab, 3], 1 + i % 4) for i in range(80)]
    with judge.case(model=MODEL, requests="80 at once, of 2 tokens with answers of 1 to 4"):
        clock = make(impl)
        clock.add(*requests)
        left = clock.run([each.request_id for each in requests])
        judge.holds("all", not left, "an end of each", f"{len(left)} have not ended: {', '.join(left[:5])}")
        for request in requests:
            check_greedy("apart", MODEL, request, clock.came[request.request_id])


def test_the_draws(impl: ModuleType) -> None:
    """500 seeds, one token each. A share of 500 draws is within 0.11 of its probability, five times its deviation."""
    for temperature in (0.5, 2.0):
        prompt = [1, 2, 3]
        with judge.case(model=MODEL, requests=f"500 seeds, prompt {prompt}, temperature {temperature:g}"):
            right = (logits_of(MODEL, prompt)[-1] / temperature).softmax(-1)
            clock = make(impl)
            requests = [Request(f"s{seed}", prompt, 1, temperature, seed) for seed in range(500)]
            clock.add(*requests)
            clock.run([each.request_id for each in requests])
            drawn = [clock.came[each.request_id][:1] for each in requests]
            if all(each == drawn[0] for each in drawn) and right.max() < 0.9:
                judge.rejects("seed", "different tokens", f"{drawn[0]} from every seed")
            for token, probability in enumerate(right.tolist()):
                share = drawn.count([token]) / len(drawn)
                near = abs(share - probability) < 0.11
                judge.holds(
                    "drawn", near, f"token {token} with probability {probability:.2f}", f"in {share:.0%} of draws"
                )


def test_seeds(impl: ModuleType) -> None:
    with judge.case(model=MODEL, requests="prompt [1, 2], temperature 2, 20 tokens"):
        answers = [alone(impl, Request("a", [1, 2], 20, 2.0, seed)) for seed in (7, 8, 7)]
        judge.equal("seed", answers[0], answers[2])
        judge.holds("seed", answers[0] != answers[1], "another answer from seed 8", f"the same: {answers[1]}")
        one = make(impl)
        for name in "ab":  # the same engine, later
            one.add(Request(name, [1, 2], 20, 2.0, 7))
            one.run(name)
        judge.equal("seed", one.came["a"], one.came["b"])


def crowds() -> Iterator[list[tuple[int, Request]]]:
    """(in which step it comes, request), from two of them to six; some have a beginning in common, some draw. The same each time."""
    draw = random.Random(16)
    for size in (2, 2, 2, 2, 3, 3, 4, 5, 6, 6):
        common = [draw.randrange(MODEL.vocab) for _ in range(draw.choice([1, 3, 20]))]
        crowd = []
        for name in "abcdef"[:size]:
            own = [draw.randrange(MODEL.vocab) for _ in range(draw.randrange(1, 8))]
            prompt = draw.choice([own, common, common + own])
            request = Request(name, prompt, draw.randrange(1, 6), draw.choice([0.0, 0.0, 1.0]), draw.randrange(4))
            crowd.append((draw.randrange(0, size), request))
        yield crowd


def test_who_else_is_there(impl: ModuleType) -> None:
    for crowd in crowds():
        with judge.case(model=MODEL, requests="; ".join(f"in step {at} {request!r}" for at, request in crowd)):
            clock = make(impl)
            for now in range(len(crowd)):
                clock.add(*(request for at, request in crowd if at == now))
                step(clock)
            left = clock.run([request.request_id for _, request in crowd])
            judge.holds("all", not left, "an end of each", f"{left} have not ended")
            for _, request in crowd:
                check_apart(impl, request, clock.came[request.request_id])


def check_apart(impl: ModuleType, request: Request, came: list[int]) -> None:
    """What came of a request in a crowd is what comes of it alone."""
    with judge.case(request=request):
        if request.temperature == 0:
            check_greedy("apart", MODEL, request, came)
        else:
            own = make(impl)
            own.add(request)
            own.run([request.request_id])
            judge.equal("apart", own.came[request.request_id], came)


def test_an_abort(impl: ModuleType) -> None:
    """Of a request that waits, of one that runs, of one that has ended, and of nobody."""
    for when in range(4):
        crowd = [Request(name, [number + 1, 2], 8) for number, name in enumerate("abc")]
        with judge.case(model=MODEL, requests=f"a, b and c; b is aborted after {when} steps, and who is called x too"):
            clock = make(impl)
            clock.add(*crowd)
            for _ in range(when):
                step(clock)
            clock.came["b"] = []
            clock.abort("b")
            clock.abort("x")
            left = clock.run("ac")
            judge.holds("abort", not left, "the ends of a and c", f"{left} have not ended")
            judge.holds("abort", not clock.came["b"], "nothing of b", f"the tokens {clock.came['b']}")
            for request in (crowd[0], crowd[2]):
                check_greedy("abort", MODEL, request, clock.came[request.request_id])
            clock.abort("a")
            judge.equal("abort", {}, step(clock, "abort"))


def test_an_id_comes_again(impl: ModuleType) -> None:
    for aborted in (False, True):
        with judge.case(model=MODEL, requests=f"a {'is aborted' if aborted else 'ends'}, then another a comes"):
            clock = make(impl)
            clock.add(Request("a", [1, 2], 4))
            step(clock)
            clock.abort("a") if aborted else clock.run("a")
            request = Request("a", [7, 3, 3], 5)
            clock.add(request)
            left = clock.run("a")
            judge.holds("again", not left, "5 tokens", f"{clock.came['a']}, and no end")
            judge.equal("again", 5, len(clock.came["a"]))
            check_greedy("again", MODEL, request, clock.came["a"])


def test_nothing_is_left_behind(impl: ModuleType) -> None:
    """Rounds of six requests with the same prompts: three end, two are aborted while they run or wait, one before its first step."""
    clock, sizes = make(impl), []
    with judge.case(model=MODEL, requests="rounds of 6; 3 of them end, 3 are aborted"):
        for number in range(26):
            names = [f"round {number}, request {i}" for i in range(6)]
            clock.add(*(Request(name, [i, 2, 3, *[4] * i], 4) for i, name in enumerate(names)))
            clock.abort(names[5])
            step(clock)
            clock.abort(names[4])
            step(clock)
            clock.abort(names[3])
            left = clock.run(names[:3])
            judge.holds("frees", not left, "an end of each", f"{left} have not ended: their places are taken")
            clock.known.clear()
            clock.came.clear()
            if number in (5, 25):
                sizes.append(held(clock.engine))
        grown = sizes[1] - sizes[0]
        judge.holds("frees", grown < 4096, "no more than before", f"{grown:,} bytes more after 120 requests")


def test_nobody_is_there(impl: ModuleType) -> None:
    with judge.case(model=MODEL):
        clock = make(impl)
        judge.equal("idle", {}, clock.step())
        clock.add(Request("a", [1], 2))
        clock.run("a")
        judge.equal("idle", {}, clock.step())
