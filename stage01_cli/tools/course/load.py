"""What `serve` asks the server with the reader's part: the load of an `exercise.toml`, and the clients that bring it.

All clients send at once, unless they keep the pace themselves (`pace = "clients"`). In which step a request then joins, and after which token a client has left, is the load's to say and the engine's
to keep (pace.py): no client sleeps, and none is too early or too late.
"""

from __future__ import annotations

import json
import string
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from stage01_cli.tools.own_server import PATIENCE, OwnServer, kill_all
from stage03_engine.errors import EngineStartError

COMPLETIONS = "/v1/completions"
TOLERANCE = 2e-3
"""How far log-probabilities may be apart that two ways of computing the same give, in float32."""
SILENCE = 60.0  # seconds without an event of any answer: only a part that loops takes so long
_ONLY_OURS = {"step": 1, "after": None, "leaves": 0, "stopped": 0, "name": None, "path": None, "call": 0}
"""Key of a row -> the least that it may be; None for text."""
_NAME = {*string.ascii_letters, *string.digits, "_"}


@dataclass(frozen=True)
class Ask:
    """One request of a load: `[[serve.load]]`.

    name      its id, and the client's; r0, r1, ... if not given
    step      it joins before this step of the engine
    after     "r0:3": it joins after the third token of r0
    leaves    its client leaves after so many tokens
    stopped   its stop string must end it with this token
    path      of another endpoint than completions, which is asked when the rest is over; with `call` many at once, while the engine runs: so
              many that the engine answers them together before `step`
    body      everything else
    """

    name: str
    step: int = 1
    after: str = ""
    leaves: int = 0
    stopped: int = 0
    path: str = COMPLETIONS
    call: int = 0
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def for_engine(self) -> bool:
        """Is it a completion?"""
        return self.path == COMPLETIONS

    def sent(self) -> dict[str, Any]:
        """The body as it is sent."""
        if not self.for_engine:
            return self.body
        usual = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return usual | self.body

    def pace(self) -> dict[str, Any]:
        """What the engine has to know of it."""
        after, _, count = self.after.partition(":")
        when = {"after": [after, int(count)]} if after else {"step": self.step}
        return {"name": self.name, **when, "gone": self.leaves or self.stopped}


def asks(rows: list[dict[str, Any]]) -> tuple[Ask, ...]:
    """The rows of `[[serve.load]]`. Raises ValueError for a value that cannot be, and for a row that refers to none before it."""
    found: list[Ask] = []
    for number, row in enumerate(rows):
        for key, least in _ONLY_OURS.items():
            if key in row:
                check_text(key, row[key]) if least is None else check_number(key, row[key], least)
        own = {key: row[key] for key in _ONLY_OURS if key in row}
        body = {key: value for key, value in row.items() if key not in _ONLY_OURS}
        ask = Ask(**{"name": f"r{number}"} | own, body=body)
        if not ask.name or set(ask.name) - _NAME:
            raise ValueError(f"name = {ask.name!r} must consist of letters, digits and _")
        if ask.name in {each.name for each in found}:
            raise ValueError(f"two requests have the name {ask.name!r}")
        if not ask.path.startswith("/"):
            raise ValueError(f"path = {ask.path!r} must begin with /")
        name, colon, count = ask.after.partition(":")
        if ask.after and not (colon and count.isdecimal() and name in {each.name for each in found}):
            raise ValueError(f"after = {ask.after!r} names no request above it, such as r0:3")
        found.append(ask)
    return tuple(found)


def check_text(key: str, value: object) -> None:
    """Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{key} = {value!r} must be text")


def check_number(key: str, value: object, least: int) -> None:
    """Raises ValueError if it is no int, or less than that."""
    if type(value) is not int or value < least:
        raise ValueError(f"{key} = {value!r} must be an int, and at least {least}")


def for_the_engine(load: tuple[Ask, ...], together: int) -> str:
    """The load as pace.py reads it."""
    calls = next((ask for ask in load if ask.call), None)
    more = {"calls": calls.call, "calls_step": calls.step} if calls else {}
    return json.dumps({"asks": [ask.pace() for ask in load if ask.for_engine], "together": together} | more)


@dataclass
class Answer:
    """What a client received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, float]] = field(default_factory=list)  # of each token: its own and the others'
    ended: str = ""  # the finish reason and the stop string; or that the client left
    events: int = 0  # of the stream

    def __str__(self) -> str:
        number = len(self.token_ids)
        tokens = f", {number} token{'s' * (number != 1)}" if number else ""
        return f"{self.text!r} ({self.ended}{tokens})"


class SilentError(EngineStartError):
    """No answer goes on."""


class _Heard:
    """When a client last heard of the server. One of them may rightly wait for long, for another's tokens; not all of them."""

    def __init__(self) -> None:
        self.now()

    def now(self) -> None:
        self.time = time.monotonic()

    def results(self, asked: Mapping[str, Future[Any]]) -> dict[str, Any]:
        """What each has received. Raises the first's error; SilentError if nobody hears anything for SILENCE seconds."""
        left = {*asked.values()}
        while left:
            done, left = wait(left, max(0.0, self.time + SILENCE - time.monotonic()), FIRST_EXCEPTION)
            if any(each.exception() for each in done):
                break
            if left and time.monotonic() >= self.time + SILENCE:
                raise SilentError(f"no answer went on for {SILENCE:.0f} s")
        return {name: each.result() for name, each in asked.items() if each not in left}


@contextmanager
def clients(server: OwnServer, number: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that ask. However the block ends, none of them has to be waited for: if it raises, the server ends first."""
    with ThreadPoolExecutor(number) as pool:
        try:
            yield pool
        except SilentError:
            kill_all(server.process)
            raise
        except EngineStartError:
            server.stop()  # which has more to say in its log
            raise
        except BaseException:  # Ctrl-C
            kill_all(server.process)
            raise


class _Turns:
    """Clients that wait for each other, as `after` says: where there are several engines, none of them knows of all requests."""

    def __init__(self, load: tuple[Ask, ...]) -> None:
        self._after = {ask.name: ask.after for ask in load}
        self._tokens, self._ended = Counter[str](), set[str]()
        self._changed = threading.Condition()

    def wait(self, ask: Ask) -> None:
        """Until the other one has so many tokens, or has ended."""
        name, _, count = self._after[ask.name].partition(":")
        with self._changed:
            while name and self._tokens[name] < int(count) and name not in self._ended:
                self._changed.wait()

    def saw(self, ask: Ask, num_tokens: int, ended: bool = False) -> None:
        """Its client has so many tokens."""
        with self._changed:
            self._tokens[ask.name] = num_tokens
            if ended:
                self._ended.add(ask.name)
            self._changed.notify_all()


def ask_all(server: OwnServer, load: tuple[Ask, ...], pace: str = "engine") -> dict[str, Answer]:
    """Bring the load, a client for each request. `pace`: who keeps it. Raises EngineStartError for the first that ends with an error, SilentError (one of
    them) if the server computes and computes."""
    calls = [ask for ask in load if ask.call for _ in range(ask.call)]
    engine = [ask for ask in load if ask.for_engine]
    heard, turns = _Heard(), _Turns(load) if pace == "clients" else None
    with clients(server, len(engine) + len(calls)) as pool:
        streams = {ask.name: pool.submit(_stream, server, ask, heard, turns) for ask in engine}
        called = {f"call {number}": pool.submit(_post, server, ask) for number, ask in enumerate(calls)}
        found = heard.results({**streams, **called})
        answers: dict[str, Answer] = {name: found[name] for name in streams}
        if calls:
            each_once = sorted({found[name] for name in called})
            answers[calls[0].name] = Answer(f"{len(called)} times {' or '.join(each_once)}", ended="answered")
        for ask in load:
            if not ask.for_engine and not ask.call:
                heard.now()
                result = heard.results({ask.name: pool.submit(_post, server, ask)})
                answers[ask.name] = Answer(result[ask.name], ended="answered")
    return answers


def _stream(server: OwnServer, ask: Ask, heard: _Heard, turns: _Turns | None) -> Answer:
    if turns is None:
        return _read(server, ask, heard)
    answer = Answer()
    try:
        turns.wait(ask)
        return _read(server, ask, heard, answer, turns)
    finally:
        turns.saw(ask, len(answer.token_ids), ended=True)


def _read(
    server: OwnServer, ask: Ask, heard: _Heard, answer: Answer | None = None, turns: _Turns | None = None
) -> Answer:
    answer = Answer() if answer is None else answer
    with closing(server.events(ask.sent(), ask.name)) as events:  # to close it is to leave
        for event in events:
            [choice] = event["choices"]
            heard.now()
            answer.events += 1
            answer.text += choice["text"]
            answer.token_ids += choice["token_ids"] or []
            answer.logprobs += _logprobs(choice.get("logprobs"))
            if turns is not None:
                turns.saw(ask, len(answer.token_ids))
            if choice["finish_reason"]:
                stop = choice["stop_reason"]
                answer.ended = choice["finish_reason"] + (f" {stop!r}" if stop is not None else "")
            if 0 < ask.leaves <= len(answer.token_ids):
                answer.ended = "the client left"
                break
    return answer


def _logprobs(found: dict[str, Any] | None) -> Iterator[dict[str, float]]:
    if found:
        for own, others in zip(found["token_logprobs"], found["top_logprobs"]):
            yield {"its own": own, **others}


def _post(server: OwnServer, ask: Ask) -> str:
    """Status and body of an answer that is no stream. Raises EngineStartError if the server dies."""
    import httpx

    try:
        answer = httpx.post(server.url + ask.path, json=ask.sent(), timeout=PATIENCE, verify=False)
    except httpx.HTTPError as error:
        raise server.died(error) from error
    return f"{answer.status_code} {answer.text}".strip()


def differing(a: Answer, b: Answer) -> str:
    """Where the answer b parts from a, in words; nothing if it does not."""
    for place, (one, other) in enumerate(zip(a.token_ids, b.token_ids)):
        if one != other:
            return f"its token {place + 1} is {one} in A and {other} in B"
    if len(a.token_ids) != len(b.token_ids):
        return f"it has {len(a.token_ids)} tokens in A and {len(b.token_ids)} in B"
    if a.text != b.text or a.ended != b.ended:
        return f"A {a}, B {b}"
    if len(a.logprobs) != len(b.logprobs):
        return f"it has log-probabilities of {len(a.logprobs)} tokens in A and of {len(b.logprobs)} in B"
    for place, (one_, other_) in enumerate(zip(a.logprobs, b.logprobs)):
        if one_.keys() != other_.keys() or any(abs(one_[key] - other_[key]) > TOLERANCE for key in one_):
            return f"the log-probabilities of its token {place + 1} are {one_} in A and {other_} in B"
    return ""
