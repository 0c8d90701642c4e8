"""What `serve` asks the server with the reader's part: the load of an `exercise.toml`, and the clients that bring it.

All clients send at once. In which step a request then joins, and after which token a client has left, is the load's to say and the engine's
to keep (pace.py): no client sleeps, and none is too early or too late.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from stage01_cli.tools.own_server import OwnServer

COMPLETIONS = "/v1/completions"
TOLERANCE = 2e-3
"""How far log-probabilities may be apart that two ways of computing the same give, in float32."""
_ONLY_OURS = ("step", "after", "leaves", "stopped", "name", "path", "call")


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
    """The rows of `[[serve.load]]`. Raises ValueError for a row that refers to none before it."""
    found: list[Ask] = []
    for number, row in enumerate(rows):
        own = {key: row[key] for key in _ONLY_OURS if key in row}
        body = {key: value for key, value in row.items() if key not in _ONLY_OURS}
        ask = Ask(**{"name": f"r{number}"} | own, body=body)
        name, colon, count = ask.after.partition(":")
        if ask.after and not (colon and count.isdecimal() and name in {each.name for each in found}):
            raise ValueError(f"after = {ask.after!r} names no request above it, such as r0:3")
        found.append(ask)
    return tuple(found)


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


def ask_all(server: OwnServer, load: tuple[Ask, ...]) -> dict[str, Answer]:
    """Bring the load, a client for each request. Raises EngineStartError for the first that ends with an error."""
    calls = [ask for ask in load if ask.call for _ in range(ask.call)]
    engine = [ask for ask in load if ask.for_engine]
    with ThreadPoolExecutor(len(engine) + len(calls)) as clients:
        streams = {ask.name: clients.submit(_stream, server, ask) for ask in engine}
        called = [clients.submit(_post, server, ask) for ask in calls]
        answers = {name: each.result() for name, each in streams.items()}
        if calls:
            each_once = sorted({each.result() for each in called})
            answers[calls[0].name] = Answer(f"{len(called)} times {' or '.join(each_once)}", ended="answered")
    for ask in load:
        if not ask.for_engine and not ask.call:
            answers[ask.name] = Answer(_post(server, ask), ended="answered")
    return answers


def _stream(server: OwnServer, ask: Ask) -> Answer:
    answer = Answer()
    with closing(server.events(ask.sent(), ask.name)) as events:  # to close it is to leave
        for event in events:
            [choice] = event["choices"]
            answer.events += 1
            answer.text += choice["text"]
            answer.token_ids += choice["token_ids"] or []
            answer.logprobs += _logprobs(choice.get("logprobs"))
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
    """Status and body of an answer that is no stream."""
    import httpx

    answer = httpx.post(server.url + ask.path, json=ask.sent(), timeout=300, verify=False)
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
