"""`--max-answers-per-key`: how many answers a key may have in the making, over all its requests (vLLM has no such bound).

One HTTP request may ask for 4,096 answers, and each is a request for the engine, with a state on both sides. Sixty such requests of one key
kept the event loop and the engine busy for seconds with nothing but taking them in.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.api_server import Services
from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.middleware import TENANT
from stage02_server.serving_engine import EngineRequests, Prompts
from stage03_engine.errors import BusyError

_TAKEN: ContextVar[list[int] | None] = ContextVar("answers taken", default=None)  # by the HTTP request that is served


class AnswersMiddleware:
    """Counts the answers of a request until the request has ended, however it ends."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = list[int]()
        token, key = _TAKEN.set(taken), TENANT.get()
        try:
            await self._app(scope, receive, send)
        finally:
            _TAKEN.reset(token)
            if taken:
                scope["app"].state.answers_in_flight[key] -= sum(taken)


class AnswersLimit:
    """What the handlers ask before they send prompts to the engine."""

    def __init__(self, most: int, in_flight: Counter[int | None]) -> None:
        self._most, self._in_flight = most, in_flight  # by key

    def check(self, requests: EngineRequests, prompts: Prompts) -> None:
        """Raises BusyError (429) if the key has too many answers in the making. A request that comes alone is never refused."""
        key, taken = TENANT.get(), _TAKEN.get()
        wanted = len(prompts) * requests.engine_requests[0].sampling_params.num_answers
        counted = self._in_flight
        if taken is None:  # not over HTTP: nobody would give them back
            return
        if counted[key] and counted[key] + wanted > self._most:
            raise BusyError(
                f"{counted[key]} answers are in the making, and {wanted} more would be above {self._most} (--max-answers-per-key); "
                "send the request again later.",
                "prompt" if len(prompts) > 1 else "n",
            )
        counted[key] += wanted
        taken.append(wanted)


def install(app: FastAPI, services: Services) -> None:
    """Let every handler ask."""
    in_flight: Counter[int | None] = Counter()
    app.state.answers_in_flight = in_flight
    services.added.hooks.append(AnswersLimit(services.args.max_answers_per_key, in_flight).check)
