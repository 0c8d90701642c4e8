"""A recording as OpenTelemetry spans: one trace per HTTP request, across processes.

    POST /v1/completions             the API server, from the first event to the last
      llm_request                    per prompt and answer; the name is vLLM's, and so are some attributes (genai.py)
        queue prefill decode preempted     the engine
        ipc                                from sending to receiving, per message that is about this request
        detokenize                         from receiving tokens to their text

Trace and span ids are hashes of run id and request id, so exporting twice gives the same ones; when the client sent a
`traceparent` its trace goes on. Times are wall-clock times, by the pair of clocks in the recording's first `run.start`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.export import genai
from stagetrace.export.collector import traces_address
from stagetrace.export.request_parts import EngineRequest, HttpRequest, Part, gather
from stagetrace.private import private
from stagetrace.read.story import Story

BATCH = 512  # spans per message to the collector
CONNECT_SECONDS = 2.0
TIMEOUT_SECONDS = 5.0  # for one message, all attempts together
_KINDS = {"wait": "queue"}  # what a span of the story is called here, where the name differs


class _Ids(IdGenerator):
    """Hands out the ids that were set for the next span."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Collector(SpanProcessor):
    """Keeps ended spans until there are enough for a message."""

    def __init__(self, send: Callable[[list[ReadableSpan]], None]) -> None:
        self._send = send
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def send(self, at_least: int = 1) -> None:
        """Send the spans collected, unless they are too few."""
        if len(self._spans) >= at_least:
            spans, self._spans = self._spans, []
            self._send(spans)


class _Spans:
    """Makes the spans of one recording."""

    def __init__(self, send: Callable[[list[ReadableSpan]], None]) -> None:
        self._ids, self._collector = _Ids(), _Collector(send)
        self._providers: dict[int, TracerProvider] = {}
        self._story = Story()
        self._run_id, self._offset = "", 0
        self._root, self._count = "", 0

    def request(self, story: Story, request: HttpRequest) -> None:
        """All spans of one HTTP request."""
        if not story.headers:
            raise TraceError("the recording has no run.start: its times cannot be turned into wall-clock times")
        header = next(iter(story.headers.values()))
        self._story, self._run_id = story, header["run_id"]
        self._offset = header["wall_clock_ns"] - header["monotonic_ns"]
        self._root, self._count = request.root, 0
        client = request.said.get("http.request", {})
        trace_id = client.get("trace_id") or hashlib.sha256(f"{self._run_id}/{request.root}".encode()).hexdigest()[:32]
        self._ids.trace_id = int(trace_id, 16)
        parent = None
        if client.get("parent_id"):
            remote = SpanContext(self._ids.trace_id, int(client["parent_id"], 16), True, TraceFlags(TraceFlags.SAMPLED))
            parent = NonRecordingSpan(remote)
        if request.pid:
            server = self._http(request, parent)
            for engine in request.engine.values():
                self._engine(request, engine, server)
            server.end(request.last_ns + self._offset)
        else:
            for engine in request.engine.values():
                self._engine(request, engine, None)
        self._collector.send(at_least=BATCH)

    def finish(self) -> None:
        """Send the rest."""
        self._collector.send()

    def _http(self, request: HttpRequest, parent: NonRecordingSpan | None) -> Span:
        said, client = request.said, request.said["http.request"]
        status = said.get("http.response", said.get("request.refused", {})).get("status")
        names = {
            "http.request.method": client["method"],
            "url.path": client["path"],
            "http.response.status_code": status,
        }
        part = Part(f"{client['method']} {client['path']}", request.first_ns, request.last_ns, request.pid, names)
        span = self._start(part, parent, SpanKind.SERVER)
        if (failure := _failure(request)) is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        return span

    def _engine(self, request: HttpRequest, engine: EngineRequest, server: Span | None) -> None:
        """`llm_request` and its parts."""
        story = engine.story
        ends = [story.last[name] for name in ("request.finished", "request.aborted") if name in story.last]
        start = story.first.get("generate.start", min(story.first.values()))
        end = max(ends, default=max(story.last.values()))
        pid = engine.front_pid or engine.engine_pid
        whole = self._start(Part("llm_request", start, end, pid, _meanings(request, engine)), server)
        for mark in engine.marks:
            whole.add_event(mark.name, _plain(mark.args), mark.ts + self._offset)
        if (failure := _engine_failure(engine)) is not None:
            whole.set_status(Status(StatusCode.ERROR, failure))
        spans = [
            Part(_KINDS.get(s.kind, s.kind), s.start_ns, s.end_ns, s.engine or pid,
                 {"first_step": s.first_step, "last_step": s.last_step, "num_tokens": s.num_tokens})
            for s in story.spans
        ]  # fmt: skip
        for part in spans + engine.parts:
            self._start(part, whole).end(part.end_ns + self._offset)
        whole.end(end + self._offset)

    def _start(self, part: Part, parent: Span | NonRecordingSpan | None, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        self._count += 1
        digest = hashlib.sha256(f"{self._run_id}/{self._root}/{self._count}".encode()).digest()
        self._ids.span_id = int.from_bytes(digest[:8])
        span = self._tracer(part.pid).start_span(
            part.name,
            set_span_in_context(parent, Context()) if parent is not None else Context(),
            kind,
            _plain(part.args),
            start_time=part.start_ns + self._offset,
        )
        assert isinstance(span, Span)
        return span

    def _tracer(self, pid: int) -> Any:
        if pid not in self._providers:
            header = self._story.headers.get(pid, {})
            resource = {
                "service.name": self._story.processes.get(pid, "unknown"),
                "service.namespace": "vllm-in-stages",
                "service.instance.id": f"{self._run_id}/{pid}",
                "service.version": header.get("versions", {}).get("vllm-in-stages", "unknown"),
                "process.pid": pid,
            }
            provider = TracerProvider(
                ALWAYS_ON, Resource(resource), shutdown_on_exit=False, id_generator=self._ids,
                span_limits=SpanLimits(max_span_attributes=SpanLimits.UNSET, max_events=SpanLimits.UNSET),
            )  # fmt: skip
            provider.add_span_processor(self._collector)
            self._providers[pid] = provider
        return self._providers[pid].get_tracer("stagetrace")


def _meanings(request: HttpRequest, engine: EngineRequest) -> dict[str, Any]:
    """The attributes of `llm_request`."""
    story, said = engine.story, request.said
    path = said.get("http.request", {}).get("path", "")
    validated, params = said.get("request.validated", {}), said.get("request.sampling_params", {})

    def seconds(ns: int | None) -> float | None:
        return None if ns is None else ns / 1e9

    def inside(kind: str) -> float | None:
        return seconds(sum(span.end_ns - span.start_ns for span in story.spans if span.kind == kind))

    start = story.first.get("generate.start", min(story.first.values()))
    return genai.attributes(
        {
            "operation": "chat" if "chat" in path else "text_completion",
            "provider": "vllm-in-stages",
            "model": validated.get("model"),
            "request_id": story.request_id,
            "max_tokens": params.get("max_tokens"),
            "temperature": params.get("temperature"),
            "stream": validated.get("stream"),
            "finish_reasons": [engine.reason] if engine.reason is not None else None,
            "prompt_tokens": story.num_prompt_tokens,
            "output_tokens": story.num_output_tokens,
            "cached_tokens": story.num_cached_tokens,
            "seconds_to_first_token": seconds(story.token_ns[0] - start) if story.token_ns else None,
            "seconds_to_first_chunk": seconds(story.chunk_ns[0] - start) if story.chunk_ns else None,
            "seconds_queued": inside("wait"),
            "seconds_prefill": inside("prefill"),
            "seconds_decode": inside("decode"),
            "seconds": seconds(max(story.last.values()) - start),
            "preemptions": story.num_preemptions,
        }
    )


def _engine_failure(engine: EngineRequest) -> str | None:
    """Why a request of the engine did not succeed; None if it did."""
    if engine.reason is None:
        return "unfinished: the engine, or the recording, ended before it"
    return engine.reason if engine.reason in ("abort", "error") else None


def _failure(request: HttpRequest) -> str | None:
    """Why an HTTP request did not succeed; None if it did."""
    refused = request.said.get("request.refused")
    if refused is not None:
        return f"{refused['status']} {refused['type']}"
    return next(filter(None, map(_engine_failure, request.engine.values())), None)


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Attribute values: no None, and text for what OpenTelemetry has no type for."""
    known = (str, bool, int, float, list)
    return {
        key: value if isinstance(value, known) else json.dumps(value)
        for key, value in args.items()
        if value is not None
    }


def export(events: Iterable[Event], send: Callable[[list[ReadableSpan]], None]) -> None:
    """Make all spans of a recording and hand them to `send`, a few hundred at a time."""
    spans = _Spans(send)
    gather(events, spans.request)
    spans.finish()


def write_file(events: Iterable[Event], path: str | Path) -> None:
    """OTLP JSON, one ExportTraceServiceRequest per line, as a collector's file receiver reads it. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private) as file:

        def write_batch(spans: list[ReadableSpan]) -> None:
            file.write(json.dumps(_otlp_json(spans)) + "\n")

        export(events, write_batch)


def _otlp_json(spans: list[ReadableSpan]) -> dict[str, Any]:
    """protobuf's JSON, except that OTLP wants ids in hex."""
    message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in message["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                    span[key] = base64.b64decode(span[key]).hex()
    return message


def send(events: Iterable[Event], url: str) -> None:
    """To a collector over OTLP/HTTP: http://host:4318, or the whole address of its traces. Raises TraceError."""
    host, port, endpoint = traces_address(url)
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise TraceError(f"{url}: no collector answers there ({error})") from error
    log = _LastLine()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(log)
    exporter = OTLPSpanExporter(endpoint, timeout=TIMEOUT_SECONDS)

    def send_batch(spans: list[ReadableSpan]) -> None:
        if exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise TraceError(f"{url}: the collector did not accept the spans ({log.line or 'no reason given'})")

    try:
        export(events, send_batch)
    finally:
        exporter.shutdown()
        logger.removeHandler(log)


class _LastLine(logging.Handler):
    """Keeps what the exporter logs, for one line of our own."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()
