"""Attacks with texts: templates that a stranger wrote, chats and prompts that take long. `long` tests measure how long others wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from server_under_test import InProcessServer, ServerProcess
from standstill import LONGEST, Standstill

from stage02_server.features.hardening.fair_threads import PER_SECOND, SMALL, FairThreads
from stage03_engine.errors import ConfigError

CHAT = "/v1/chat/completions"
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def going_on(size: int) -> tuple[list[dict[str, str]], str]:
    """Two messages of `size` characters together, and the prompt that ends with the second one.

    The template strips its line break, so that it is not found as it was sent: what `rfind` notices, line by line, only after
    it has compared nearly the whole message.
    """
    lines = "a\n" * (size // 6)
    messages = [{"role": "user", "content": lines * 2}, {"role": "user", "content": "\nb\n" + lines}]
    return messages, f"<user>{lines * 2}".strip() + "<end><user>b\n" + lines.strip()


@pytest.fixture(scope="module")
def trusting() -> Iterator[InProcessServer]:
    server = InProcessServer(chat_template=TRIMMING, trust_request_chat_template=True, max_request_templates=2)
    yield server
    server.close()


def prompt_made(server: InProcessServer, messages: list[dict[str, str]], **fields: Any) -> str:
    """Of messages, by the template, as text."""
    response = server.post("/tokenize", {"messages": messages, **fields})
    assert response.status_code == 200, response.text
    return server.post("/detokenize", {"tokens": response.json()["tokens"]}).json()["prompt"]


GO_ON = {"continue_final_message": True, "add_generation_prompt": False}


def test_the_end_of_the_last_message_is_found_in_linear_time(trusting: InProcessServer) -> None:
    """In quadratic time these characters would take more CPU time than the process that renders has."""
    messages, prompt = going_on(200_000)
    assert prompt_made(trusting, messages, **GO_ON) == prompt


@given(st.text(" \nab", max_size=6), st.text(" \nab", max_size=6))
def test_the_last_message_ends_the_prompt_as_in_the_slow_search(trusting: InProcessServer, one: str, two: str) -> None:
    messages = [{"role": "user", "content": one}, {"role": "user", "content": two}]
    whole = prompt_made(trusting, messages)
    places = [whole.rfind(text) + len(text) for text in (two, two.rstrip(), two.strip()) if text in whole]
    if two.strip():
        assert prompt_made(trusting, messages, **GO_ON) == whole[: places[0]]
    else:
        assert trusting.post("/tokenize", {"messages": messages, **GO_ON}).status_code == 400


# --- what a template may call, and how much it may take

HELLO = [{"role": "user", "content": "Hi"}]
CALLED = "cycler('ab', 'cd').next"  # a function of the template; called by the library, not by the template, it would go unseen
REFUSED = {
    "tojson: a class of its own": "{{ ['a']|tojson(cls=namespace, encode=''.join) }}",
    "tojson: a function for what is not JSON": "{{ messages[0].items|tojson(default=[1].count) }}",
    "tojson: another argument of json.dumps": "{{ 5|tojson(skipkeys=true) }}",
    "tojson: a fraction as indent": "{{ [5]|tojson(indent=1.5) }}",
    "tojson: a huge indent": "{{ [5]|tojson(indent=10 ** 9) }}",
    "tojson: a number as ensure_ascii": "{{ 5|tojson(ensure_ascii=1) }}",
    "tojson: a text as sort_keys": "{{ 5|tojson(sort_keys='a') }}",
    "tojson: a number as separators": "{{ 5|tojson(separators=1) }}",
    "tojson: one separator": "{{ 5|tojson(separators=(',',)) }}",
    "tojson: numbers as separators": "{{ 5|tojson(separators=(1, 2)) }}",
    "dictsort calls items": "{{ namespace(items=CALLED)|dictsort }}",
    "xmlattr calls items": "{{ namespace(items=cycler([('a', 'b')]).next)|xmlattr }}",
    "dict calls keys": "{{ dict(namespace(keys=CALLED)) }}",
    "a call with ** calls keys": "{{ dict(**namespace(keys=CALLED)) }}",
    "an object that pretends to be a function": "{{ namespace(__call__=range)(3) }}",
    "map by a function": "{{ [1]|map(''.join)|list }}",
    "select by a function": "{{ [1]|select(''.join)|list }}",
    "reject by a function": "{{ [1]|reject(''.join)|list }}",
    "selectattr by a function": "{{ [messages[0]]|selectattr('role', ''.join)|list }}",
    "sum of classes": "{{ ['']|sum('__class__') }}",
    "a class that is changed": "{% set namespace.x = 1 %}",
    "another template": "{% include 'x' %}",
    "an import": "{% import self as x %}",
    "a private attribute": "{{ self._TemplateReference__context.environment }}",
    "the globals of a function": "{{ lipsum.__globals__['os'] }}",
    "a huge range": "{{ range(10 ** 6)|length }}",
    "a huge product": "{{ 'x' * 10 ** 9 }}",
    "a huge list": "{{ ([1] * 10 ** 9)|length }}",
    "center": "{{ 'x'|center(10 ** 9) }}",
    "str.center": "{{ 'x'.center(10 ** 9) }}",
    "str.ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "str.rjust": "{{ 'x'.rjust(10 ** 9) }}",
    "str.zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "str.format": "{{ '{:9999999999}'.format(1) }}",
    "str.replace": "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}",
    "str.join": "{{ ('x' * 10 ** 5).join(range(10 ** 5)|map('string')) }}",
    "format": "{{ '%9999999999d'|format(1) }}",
    "indent": "{{ 'a\nb'|indent(10 ** 9) }}",
    "batch": "{{ [1]|batch(10 ** 9, 2)|list }}",
    "to_bytes": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "a nesting": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "blocks in blocks": "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "a loop in itself": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a lone surrogate": r"{{ '\ud800' }}",
    "a lone surrogate in the error": r"{{ raise_exception('\ud800') }}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_may_not_do(trusting: InProcessServer, name: str) -> None:
    template = REFUSED[name].replace("CALLED", CALLED)
    response = trusting.post("/tokenize", {"messages": HELLO, "chat_template": template})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages", response.text
    message = response.json()["error"]["message"]
    assert len(message) < 500 and "0x" not in message and "send the request again" not in message


ALLOWED = {
    "{% set n = namespace() %}{% set n.n = n %}{{ n }}": "<Namespace {'n': <Namespace {...}>}>",
    "{{ {'b': 1, 'a': 'é'}|tojson }}": '{"b": 1, "a": "é"}',
    "{{ {'b': 1, 'a': 'é'}|tojson(ensure_ascii=true, sort_keys=true) }}": '{"a": "\\u00e9", "b": 1}',
    "{{ [1, 2]|tojson(indent=1, separators=(',', ':')) }}": "[\n 1,\n 2\n]",
    "{{ [1, 2]|tojson(separators=[';', '=']) }}{{ [1]|tojson(indent='-') }}": "[1;2][\n-1\n]",
    "{% set n = namespace(a=1) %}{% set n.b = 2 %}{{ n.a }}{{ n.b }}{{ n['a'] }}{{ n|attr('b') }}{{ n.c is defined }}": "1212False",
    "{% macro m() %}M{% endmacro %}{% set n = namespace(f=m, g=CALLED) %}{{ n.f() }}{{ n.g() }}{{ n['g']() }}": "Mabcd",
    "{{ namespace(__html__=CALLED)|escape is string }}": "True",
    "{{ ''|attr('__class__') }}{{ ['']|map(attribute='__class__')|first }}": "",
    "{{ ['']|selectattr('__class__')|list }}{{ ['']|groupby('__class__')|length }}": "[]1",
    "{{ '{0.__class__}'.format('') }}{{ '{a.__class__}'.format_map({'a': ''}) }}": "",
    "{{ '{0.__class__}'|attr('format')('') }}{{ ['']|join(attribute='__class__') }}": "",
    "{{ ['b', 'a']|sort(attribute='__class__')|join }}": "ba",
}


@pytest.mark.parametrize("template", ALLOWED)
def test_what_a_template_may_do(trusting: InProcessServer, template: str) -> None:
    made = prompt_made(trusting, HELLO, chat_template="<" + template.replace("CALLED", CALLED))
    assert made == "<" + ALLOWED[template]
    assert not made.startswith("<ab")


def test_what_can_be_called_is_not_called_by_a_filter(trusting: InProcessServer) -> None:
    """`escape` would call __html__, whose answer stands for the object: the next call would answer otherwise."""
    template = (
        "{% set c = cycler('a', 'b') %}{% set n = namespace(__html__=c.next) %}{% set x = n|escape %}{{ c.next() }}"
    )
    assert prompt_made(trusting, HELLO, chat_template=template) == "a"


# --- a slow template holds up its like only


def renderers() -> dict[int, psutil.Process]:
    """The processes that render, by id."""
    wanted = "stage02_server.features.chat_template.process"
    return {child.pid: child for child in psutil.Process().children() if wanted in child.cmdline()}


def new_renderer(server: InProcessServer, **body: Any) -> psutil.Process:
    """The process that this request starts."""
    before = renderers()
    assert server.post("/tokenize", {"messages": HELLO, **body}).status_code == 200
    (new,) = renderers().keys() - before.keys()
    return renderers()[new]


def test_chats_wait_for_their_like_only(make_server: Callable[..., InProcessServer]) -> None:
    """Short chats, long chats, and templates of requests, of which so many wait as the flag says."""
    server = make_server(chat_template=TRIMMING, trust_request_chat_template=True, max_request_templates=2)
    own, long = (
        {"messages": HELLO, "chat_template": "{{ 7 }}"},
        {"messages": [{"role": "user", "content": "a" * 70_000}]},
    )
    stopped = [new_renderer(server, **body) for body in (own, long)]

    async def attack() -> list[int]:
        def ask(body: dict[str, Any], path: str = "/tokenize") -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(server.send("POST", path, json=body))

        waiting = [ask(own), ask(own, CHAT), ask(long)]
        await asyncio.sleep(0)
        while True:  # until both count
            refused = await server.send("POST", CHAT, json=own | {"max_tokens": 1})
            if refused.status_code == 429:
                break
        assert refused.headers["Retry-After"] == "1" and refused.json()["error"]["param"] == "chat_template"
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert "--max-request-templates" in refused.json()["error"]["message"]
        for body in ({"messages": HELLO}, {"prompt": "a" * 10_000}):
            assert (await ask(body)).status_code == 200
        assert not any(task.done() for task in waiting)
        waiting.pop(1).cancel()  # its client leaves, and with it its place is free
        while (last := ask(own)) and await settled(last):
            assert last.result().status_code == 429
        for process in stopped:
            process.resume()
        return [(await task).status_code for task in (*waiting, last)]

    async def settled(task: asyncio.Task[httpx.Response]) -> bool:
        """True if it is answered although the process stands still."""
        quick = asyncio.create_task(server.send("POST", "/tokenize", json={"messages": HELLO}))
        await quick
        return task.done()

    try:
        for process in stopped:
            process.suspend()
        assert server.run(attack()) == [200, 200, 200]
    finally:
        for process in stopped:
            process.resume()


def test_at_least_one_template_of_a_request_must_be_possible(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server(chat_template=TRIMMING)
    for name in ("max_request_templates", "max_tokenize_characters"):
        with pytest.raises(ConfigError, match=name):
            type(server.args)(**{name: 0}).check()


# --- long texts


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/tokenize", "prompt", lambda text: text),
        ("/tokenize", "messages", lambda text: [{"role": "user", "content": text}]),
        ("/v1/messages/count_tokens", "messages", lambda text: [{"role": "user", "content": text}]),
    ],
)
def test_a_text_that_goes_no_further_has_a_limit(
    limited: InProcessServer, path: str, field: str, value: Callable[[str], Any]
) -> None:
    for characters, status in ((20_000, 200), (20_001, 400)):
        response = limited.post(path, {"model": "byte-model", field: value("é" * characters)})
        assert response.status_code == status
    error = response.json()["error"]
    assert "20000" in error["message"] and "--max-tokenize-characters" in error["message"]
    assert error.get("param", field) == field


@pytest.fixture(scope="module")
def limited() -> Iterator[InProcessServer]:
    server = InProcessServer(max_tokenize_characters=20_000)
    yield server
    server.close()


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    fair = FairThreads("test")
    yield fair
    fair.shutdown()


def held(threads: Executor, go: threading.Event) -> None:
    """Occupy one of the threads until `go`."""
    begun = threading.Event()
    threads.submit(lambda: (begun.set(), go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)


def test_large_work_leaves_a_thread_to_small_work(threads: FairThreads) -> None:
    go = threading.Event()
    try:
        held(threads.of(SMALL + 1), go)
        large = threads.of(SMALL + 2).submit(lambda: "large")
        small = [threads.of(SMALL).submit(lambda number=number: number) for number in range(5)]
        assert [future.result(PATIENCE) for future in small] == list(range(5)) and not large.done()
    finally:
        go.set()
    assert large.result(PATIENCE) == "large"


def test_small_before_large_but_not_for_ever(threads: FairThreads) -> None:
    go, done = threading.Event(), list[str]()
    sizes = {"huge": 80 * PER_SECOND, "large": 20 * PER_SECOND, "small": 1, "gone": 2}
    try:
        held(threads.of(SMALL + 1), go)
        held(threads.of(1), go)
        futures = {name: threads.of(size).submit(done.append, name) for name, size in sizes.items()}
        assert futures.pop("gone").cancel()
    finally:
        go.set()
    for future in futures.values():
        future.result(PATIENCE)
    assert sorted(done) == ["huge", "large", "small"] and done.index("large") < done.index("huge")


def test_an_error_reaches_who_waits(threads: FairThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        threads.of(1).submit(lambda: 1 // 0).result(PATIENCE)


@pytest.fixture(scope="module")
def process() -> Iterator[str]:
    """The address of a server that takes templates from requests."""
    how = ("--engine", "echo", "--host", "127.0.0.1", "--port", "0")
    with closing(
        ServerProcess("gpt2-tiny", *how, "--chat-template", TRIMMING, "--trust-request-chat-template")
    ) as server:
        yield server.wait_until_ready()


def longest_wait(
    url: str, path: str, body: dict[str, Any], attack: list[tuple[str, dict[str, Any]]]
) -> tuple[float, list[int]]:
    """Seconds that a neighbour waits for an answer to `body`, again and again while the attack lasts; and the attack's answers."""
    over, longest = threading.Event(), 0.0

    def send(each: tuple[str, dict[str, Any]]) -> int:
        return httpx.post(url + each[0], json=each[1], timeout=PATIENCE).status_code

    def ask() -> None:
        nonlocal longest
        with httpx.Client(base_url=url, timeout=PATIENCE) as neighbour:
            while not over.is_set():
                start = time.monotonic()
                assert neighbour.post(path, json=body).status_code == 200
                longest = max(longest, time.monotonic() - start)

    with ThreadPoolExecutor(len(attack) + 1) as threads:
        asking = threads.submit(ask)
        answers = list(threads.map(send, attack))
        over.set()
        asking.result()
    return longest, answers


LONG_TEXTS = {
    "one letter": "a" * 7_500_000,
    "words": "To be, or not to be " * 375_000,
    "spaces": " " * 7_500_000,
    "four bytes each": "\U0001d54f" * 1_900_000,
}


@pytest.mark.long
@pytest.mark.parametrize("size", [120_000, 1_000_000, 5_000_000])
def test_standstill_of_a_chat_that_goes_on(process: str, size: int) -> None:
    body = {"messages": going_on(size)[0], "max_tokens": 1, **GO_ON}
    with Standstill(process) as standstill:
        for path in (CHAT, "/tokenize"):
            assert httpx.post(process + path, json=body, timeout=PATIENCE).status_code in (200, 400)
    print(f"{size} characters: health {standstill.seconds:.3f} s")
    assert standstill.seconds < LONGEST


@pytest.mark.long
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_standstill_of_twelve_slow_templates(process: str, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": ENDLESS}
    with Standstill(process) as standstill:
        wait, answers = longest_wait(process, "/tokenize", {"prompt": "a" * 10_000}, [(path, body)] * 12)
        chat, _ = longest_wait(process, "/tokenize", {"messages": body["messages"]}, [(path, body)] * 12)
    print(f"text {wait:.3f} s, chat {chat:.3f} s, health {standstill.seconds:.3f} s, {answers}")
    assert set(answers) == {400, 429}
    assert standstill.seconds < LONGEST and wait < 4 * LONGEST and chat < 4 * LONGEST


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_standstill_of_texts_that_take_long(process: str, name: str) -> None:
    text = LONG_TEXTS[name]
    messages = [{"role": "user", "content": text}]
    attack = [
        ("/tokenize", {"prompt": text}), ("/tokenize", {"messages": messages}), ("/v1/completions", {"prompt": text}),
        ("/v1/messages/count_tokens", {"model": "gpt2-tiny", "messages": messages}),
    ]  # fmt: skip
    with Standstill(process) as standstill:
        for two in (attack[:2], attack[2:]):
            wait, answers = longest_wait(process, "/tokenize", {"prompt": "To be, or " * 1000}, two)
            assert wait < 4 * LONGEST
            print(f"{name}: a neighbour's 10,000 characters {wait:.3f} s, {answers}")
    print(f"{name}: health {standstill.seconds:.3f} s")
    assert standstill.seconds < LONGEST
