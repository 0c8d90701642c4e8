"""What a span says about a request (vllm/v1/engine/output_processor.py, do_tracing). Imports nothing of OpenTelemetry: on the event loop a
span is a few numbers, which exporter.py turns into one.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.api_server import Services
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.otlp.exporter import SpanSender
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests, Prompts
from stage03_engine.frontend.metrics import RequestStats
from stage03_engine.outputs import RequestOutput
from stage03_engine.plugins import find


@dataclass(frozen=True)
class Caller:
    """What the HTTP request says. Without a valid `traceparent` the ids are None, and the span begins a trace."""

    path: str = ""
    trace_id: str | None = None
    parent_id: str | None = None
    sampled: bool = True  # the caller records its own span


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass(frozen=True)
class FinishedSpan:
    """One request of the engine that ended. Times in ns since 1970."""

    start_ns: int
    end_ns: int
    caller: Caller
    values: dict[str, Any] = field(default_factory=dict)  # meaning (stagetrace/export/genai.py) -> value


class ContextMiddleware:
    """Keeps what the header `traceparent` says for the request that it is about."""

    def __init__(self, app: ASGIApp, args: FrontendArgs) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            CALLER.set(caller_of(scope["state"]["path"], Headers(scope=scope).getlist("traceparent")))
        await self._app(scope, receive, send)


def caller_of(path: str, values: list[str]) -> Caller:
    """`values`: the `traceparent` headers."""
    parse = find("server", "trace_context")
    trace_id, parent_id = parse(values) if values and parse is not None else (None, None)
    if trace_id is None:
        return Caller(path)
    return Caller(path, trace_id, parent_id, sampled=bool(int(values[0].split("-")[3], 16) & 1))


class SpanHook(AnswerHook):
    """The spans of one HTTP request: one for each prompt, with all its answers."""

    def __init__(self, requests: EngineRequests, sender: SpanSender) -> None:
        self._requests, self._sender, self._caller = requests, sender, CALLER.get() or Caller()
        self._arrival = time.monotonic()
        self._ended: dict[int, list[RequestStats]] = {}
        self._reasons: dict[int, list[str]] = {}

    def output(self, prompt: int, output: RequestOutput) -> None:
        """Keeps the histories of answers that ended; the last one ends the span."""
        for answer in output.outputs:
            if answer.stats is not None:
                self._ended.setdefault(prompt, []).append(answer.stats)
            if answer.finish_reason is not None:
                self._reasons.setdefault(prompt, []).append(answer.finish_reason)
        if output.finished:
            self._sender.put(self._span(prompt, output))

    def _span(self, prompt: int, output: RequestOutput) -> FinishedSpan:
        made = self._requests.engine_requests[prompt]
        params, stats = made.sampling_params, self._ended.get(prompt, [])
        arrival = min((each.arrival for each in stats), default=self._arrival)
        now, wall_ns = time.monotonic(), time.time_ns()
        return FinishedSpan(
            wall_ns - int(1e9 * (now - arrival)),
            wall_ns,
            self._caller,
            {
                "operation": "chat" if "chat" in self._caller.path else "text_completion",
                "provider": "vllm-in-stages",
                "model": self._requests.model,
                "request_id": made.request_id,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "max_tokens": params.max_tokens,
                "n": self._requests.n,
                "finish_reasons": self._reasons.get(prompt),
                "prompt_tokens": len(made.prompt_token_ids),
                "output_tokens": sum(each.num_output_tokens for each in stats) or None,
                "cached_tokens": output.num_cached_tokens,
                "seconds": now - arrival,
                **_times([each for each in stats if each.num_output_tokens]),
            },
        )


def _times(answers: list[RequestStats]) -> dict[str, float | int]:
    """From the histories of answers with a token; nothing without any, as with beam search."""
    if not answers:
        return {}
    first = min(answers, key=lambda each: each.first_token)
    prefill = max(0.0, first.first_token - first.arrival - first.queue_seconds)
    decode = max(each.last_token for each in answers) - first.first_token
    return {
        "seconds_to_first_token": first.first_token - first.arrival,
        "seconds_queued": first.queue_seconds,
        "seconds_prefill": prefill,
        "seconds_decode": decode,
        "seconds_inference": prefill + decode,
        "preemptions": sum(each.num_preemptions for each in answers),
    }


def install(app: FastAPI, services: Services) -> None:
    """Make spans of all requests that the handlers get, and send them in a thread."""
    sender = SpanSender(services.args.otlp_traces_endpoint)
    services.added.hooks.append(lambda requests, prompts: _hook(requests, prompts, sender))


def _hook(requests: EngineRequests, prompts: Prompts, sender: SpanSender) -> SpanHook | None:
    caller = CALLER.get()
    return SpanHook(requests, sender) if caller is None or caller.sampled else None
