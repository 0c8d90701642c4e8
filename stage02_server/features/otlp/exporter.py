"""Sends spans to a collector over OTLP/HTTP, from a thread (vllm/tracing/__init__.py, init_tracer; OpenTelemetry's BatchSpanProcessor).

The event loop never waits: what ends goes into a bounded queue, and is dropped where that is full. OpenTelemetry is imported by the thread. What its
SDK reads from the environment counts: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from stagetrace.export.collector import traces_address
from stagetrace.export.genai import attributes

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from stage02_server.features.otlp.spans import Caller, FinishedSpan

logger = logging.getLogger(__name__)
MOST_SPANS = 2048  # that wait
BATCH = 512  # spans in a message
GATHER_SECONDS = 0.5  # from the first span of a message to its sending
TIMEOUT_SECONDS = 5.0  # for one message, all attempts together
END_SECONDS = 3.0  # for what is left at the end
EXPORTERS_LOG = "opentelemetry.exporter"


class SpanSender:
    """A queue, and the thread that empties it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._queue: queue.Queue[FinishedSpan | None] = queue.Queue(MOST_SPANS)
        self._ending = threading.Event()
        self._fails = self._full = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, span: FinishedSpan) -> None:
        """Send it some time. Never waits: a span that finds no room is dropped."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            if not self._full:
                self._full = True
                logger.warning("%d spans wait for the collector at %s: others are dropped.", MOST_SPANS, self._url)

    def close(self) -> None:
        """Send what is left, for END_SECONDS at most. May be called twice."""
        if self._ending.is_set():
            return
        atexit.unregister(self.close)
        self._ending.set()
        try:
            self._queue.put_nowait(None)  # wakes the thread
        except queue.Full:
            pass
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            spans = _Spans(self._url)
        except Exception as error:  # of OpenTelemetry, which reads its environment
            logger.warning("No spans are sent to %s: %s: %s", self._url, type(error).__name__, error)
            return
        while not (self._ending.is_set() and self._queue.empty()):
            found = [self._queue.get()]
            self._ending.wait(GATHER_SECONDS)
            while len(found) < BATCH and not self._queue.empty():
                found.append(self._queue.get())
            self._send(spans, [each for each in found if each is not None])
        spans.close()

    def _send(self, spans: _Spans, found: list[FinishedSpan]) -> None:
        """Only this thread takes from the queue. A failure is told once, until one message arrives."""
        problem = spans.send(found) if found else None
        if problem is None:
            self._full = self._full and self._queue.full()
            if self._fails and found:
                logger.info("The collector at %s takes spans again.", self._url)
                self._fails = False
        elif not self._fails:
            self._fails = True
            logger.warning("The collector at %s does not take the spans, and this is told once: %s", self._url, problem)


class _Spans:
    """Makes spans with OpenTelemetry's SDK, and sends them."""

    def __init__(self, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._success = SpanExportResult.SUCCESS
        own = {} if _named() else {"service.name": "vllm-in-stages"}
        resource = Resource.create({**own, "process.pid": os.getpid()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer = self._provider.get_tracer("vllm-in-stages")
        self._exporter = OTLPSpanExporter(traces_address(url)[2], timeout=TIMEOUT_SECONDS)
        self._log = _LastLine()
        log = logging.getLogger(EXPORTERS_LOG)  # says each failure, several times
        log.addHandler(self._log)
        log.propagate = False

    def send(self, found: list[FinishedSpan]) -> str | None:
        """None if the collector has them, else why not."""
        self._log.line = ""
        try:
            ended = [span for span in map(self._ended, found) if span is not None]
            if not ended or self._exporter.export(ended) is self._success:
                return None
        except Exception as error:  # whatever a collector answers: the thread goes on
            return f"{type(error).__name__}: {error}"
        return self._log.line or "no reason given"

    def _ended(self, span: FinishedSpan) -> Any:
        """The span; None if OpenTelemetry's sampler leaves it out, or OTEL_SDK_DISABLED switched all off."""
        from opentelemetry.trace import SpanKind

        made = self._tracer.start_span(
            "llm_request", _context(span.caller), SpanKind.SERVER, attributes(span.values), start_time=span.start_ns
        )
        recorded = made.is_recording() and made.get_span_context().trace_flags.sampled
        made.end(span.end_ns)
        return made if recorded else None

    def close(self) -> None:
        """Give the connection back."""
        self._exporter.shutdown()


def _named() -> bool:
    """Does the environment name the service?"""
    return "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")


def _context(caller: Caller) -> Context:
    """The caller's span as the parent; without one, none."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if caller.trace_id is None or caller.parent_id is None:
        return Context()
    parent = SpanContext(int(caller.trace_id, 16), int(caller.parent_id, 16), True, TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(parent), Context())


class _LastLine(logging.Handler):
    """Keeps what the exporter logs, for one line of our own."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.line = " ".join(record.getMessage().split())[:300]
