"""`--max-num-queued-reqs` and `--max-num-queued-tokens`: a busy server refuses more work at once.

Source: vllm/v1/engine/async_llm.py, check_admission. As in vLLM, nothing is refused unless a flag sets a limit. vLLM asks before it
reads the prompts and once more afterwards. Here it asks when the header is there and the key is right. With its body the request
takes one place, and with its prompts it takes theirs instead, so that no part of a burst slips through uncounted. A body that never
ends takes nobody's place.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import FastAPI
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.api_server import Services
from stage02_server.cli_args import FrontendArgs
from stage02_server.errors import RETRY_AFTER_SECONDS, APIError, error_response
from stage02_server.features.admin.manifest import AdminFlags
from stage02_server.features.admin.server_load import is_work
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests, Prompts
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreOutputs, EngineCoreRequest
from stage03_engine.outputs import RequestOutput

REQS, TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"


def http_name(request_id: str) -> str:
    """The HTTP request that an engine request belongs to: its id is that of the HTTP request, and the number of the prompt."""
    return request_id.rpartition("-")[0]


class Admission:
    """Knows how many requests wait or run, and how many of their prompt tokens have no first output yet.

    Both are what the engine's front end has registered, and what is reserved: one place for an HTTP request whose prompts are
    not known yet, and those of engine requests that are about to be registered. Only called on the event loop.
    """

    def __init__(self, engine: AsyncLLM, args: FrontendArgs, rejections: Counter, model_name: str) -> None:
        self._processor = engine.output_processor
        self._max_reqs, self._max_tokens = args.max_num_queued_reqs, args.max_num_queued_tokens
        self._rejections = {reason: rejections.labels(model_name, reason) for reason in (REQS, TOKENS)}
        # HTTP request -> {its own name, or engine request: (places, prompt tokens)}
        self._reserved: dict[str, dict[str, tuple[int, int]]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that wait or run; one with n answers counts as n."""
        return len(self._processor.request_states) + sum(places for places, _ in self._to_be_registered())

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens of requests without any output yet."""
        states = (state.stats for state in self._processor.request_states.values())
        registered = sum(stats.num_prompt_tokens for stats in states if stats.num_output_tokens == 0)
        return registered + sum(tokens for _, tokens in self._to_be_registered())

    def _to_be_registered(self) -> Iterator[tuple[int, int]]:
        there = set(self._processor.external_req_ids)
        there |= {http_name(request_id) for request_id in there}
        return (counted for own in self._reserved.values() for name, counted in own.items() if name not in there)

    def check(self, places: int = 1) -> None:
        """Raises APIError 503 if so many more requests are too many now, and counts the refusal."""
        there = self.num_requests
        if self._max_reqs is not None and there + places > self._max_reqs:
            self._refuse(REQS, f"{there} requests wait or run, and {places} more would exceed {self._max_reqs}")
        if self._max_tokens is not None and (waiting := self.num_prefill_tokens) >= self._max_tokens:
            self._refuse(TOKENS, f"{waiting} prompt tokens wait to be computed, and the limit is {self._max_tokens}")

    def _refuse(self, reason: str, numbers: str) -> None:
        self._rejections[reason].inc()
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        message = f"The server is overloaded: {numbers} (--{reason.replace('_', '-')}). Try again later."
        raise APIError(503, "ServiceUnavailableError", message, headers=headers)

    def enter(self, name: str) -> None:
        """Reserve a place for an HTTP request whose body is there, but not read yet. Raises APIError 503."""
        self.check()
        self._reserved[name] = {name: (1, 0)}

    def admit(self, requests: list[EngineCoreRequest]) -> None:
        """Reserve the places of its engine requests instead. Raises APIError 503."""
        name = http_name(requests[0].request_id)
        self.leave(name)
        counts = [made.sampling_params.num_answers for made in requests]
        self.check(sum(counts))
        self._reserved[name] = {
            made.request_id: (count, count * len(made.prompt_token_ids)) for made, count in zip(requests, counts)
        }

    def leave(self, name: str) -> None:
        """An HTTP request ends: give back what it still reserves."""
        self._reserved.pop(name, None)

    def begun(self, request_id: str) -> None:
        """An engine request has its first output, so it was registered, and may be gone in a moment."""
        self._reserved.get(http_name(request_id), {}).pop(request_id, None)

    def received(self, outputs: EngineCoreOutputs) -> None:
        """The engine's next outputs, before they are processed."""
        for output in outputs.outputs:
            if (state := self._processor.request_states.get(output.request_id)) is not None:
                self.begun(state.external_req_id)

    def close(self) -> None:
        """The engine is gone."""
        self._reserved.clear()

    def hook(self, requests: EngineRequests, prompts: Prompts) -> AnswerHook:
        """Sees when the prompts of a completion or a chat have been begun."""
        return _Begun(self, requests)


class _Begun(AnswerHook):
    """Notes the first output of a prompt that a feature answers from engine requests of its own (beam search)."""

    def __init__(self, admission: Admission, requests: EngineRequests) -> None:
        self._admission, self._requests = admission, requests

    def output(self, prompt: int, output: RequestOutput) -> None:
        self._admission.begun(self._requests.engine_requests[prompt].request_id)


class AdmissionMiddleware:
    """Refuses requests for the model while there is no place for them: at once, and again when their body has arrived."""

    def __init__(self, app: ASGIApp, args: AdminFlags) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        admission: Admission = scope["app"].state.admission
        name = scope["state"]["ids"].engine
        try:
            admission.check()
            arrived = [await _whole_body(receive)]
            admission.enter(name)
        except (APIError, HTTPException) as refusal:
            await error_response(scope, refusal)(scope, receive, send)
            return

        async def receive_again() -> Message:
            return arrived.pop() if arrived else await receive()

        try:
            await self._app(scope, receive_again, send)
        finally:
            admission.leave(name)


async def _whole_body(receive: Receive) -> Message:
    """The body in one message; or that the client has left. Raises HTTPException for a body that is too long."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            return {"type": "http.request", "body": bytes(body), "more_body": False}
    return message


def install(app: FastAPI, services: Services) -> None:
    """Count what is refused; with a limit, let every handler ask before it sends prompts to the engine."""
    rejections = Counter(
        "vllm:admission_rejections", "Requests refused because too many wait or run, by the limit.",
        ["model_name", "reason"], registry=services.registry,
    )  # fmt: skip
    args = services.args
    app.state.admission = admission = Admission(services.engine, args, rejections, services.models.names[0])
    if args.max_num_queued_reqs is None and args.max_num_queued_tokens is None:
        return
    services.engine.listeners.append(admission)
    services.added.admit.append(admission.admit)
    services.added.hooks.append(admission.hook)
