"""The OTLP export, received by a collector: an HTTP server that decodes what an OpenTelemetry collector would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_collector import Collector, attributes, received
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import Event, Story, read_run, tell, trace
from stagetrace.__main__ import main
from stagetrace.export import otlp
from stagetrace.ids import root_of
from stagetrace.vocabulary import VOCABULARY

RECORDED = Path(__file__).parents[2] / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir())


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def of_events(events: list[Event]) -> list[tuple[str, Span]]:
    requests: list[ExportTraceServiceRequest] = []
    otlp.export(events, lambda spans: requests.append(otlp.encode_spans(spans)))
    return received(requests)


def nanoseconds(story: Story, wall_ns: int) -> int:
    """Back to the recording's clock."""
    header = next(iter(story.headers.values()))
    return wall_ns - header["wall_clock_ns"] + header["monotonic_ns"]


def check_request(story: Story, spans: list[tuple[str, Span]], request_id: str) -> None:
    """The spans of one trace hold what the story says of its one request."""
    request = story.requests[request_id]
    by_id = {span.span_id: span for _, span in spans}
    assert len(by_id) == len(spans), "span ids are unique"
    (server,) = (span for _, span in spans if not span.parent_span_id)
    (whole,) = (span for _, span in spans if span.name == "llm_request")
    assert server.name == "POST /v1/completions" and server.kind == Span.SPAN_KIND_SERVER
    assert whole.parent_span_id == server.span_id
    parts = [(service, span) for service, span in spans if span not in (server, whole)]
    assert all(span.parent_span_id == whole.span_id for _, span in parts)
    for _, span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        around = by_id.get(span.parent_span_id, span)
        assert around.start_time_unix_nano <= span.start_time_unix_nano
    names = {"queue": "wait"}
    kinds = ("queue", "prefill", "decode", "preempted")
    engine = [(service, span) for service, span in parts if span.name in kinds]
    assert [service for service, _ in engine] == [story.processes[span.engine] for span in request.spans]
    times = [
        (
            names.get(s.name, s.name),
            nanoseconds(story, s.start_time_unix_nano),
            nanoseconds(story, s.end_time_unix_nano),
        )
        for _, s in engine
    ]
    assert times == [(span.kind, span.start_ns, span.end_ns) for span in request.spans]
    assert nanoseconds(story, server.start_time_unix_nano) == request.first["http.request"]
    assert nanoseconds(story, server.end_time_unix_nano) == max(request.last.values())
    said = attributes(whole)
    assert said["gen_ai.usage.output_tokens"] == said["gen_ai.usage.completion_tokens"] == request.num_output_tokens
    assert (
        said["gen_ai.usage.input_tokens"] == request.num_prompt_tokens and said["gen_ai.request.model"] == "gpt2-tiny"
    )
    assert [event.name for event in whole.events].count("sched.preempt") == request.num_preemptions
    failed = request.reason in (None, "abort")
    for span in (server, whole):
        assert span.status.code == (Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_UNSET)


@pytest.mark.parametrize("name", RUNS)
def test_a_collector_receives_one_trace_per_request(name: str, collector: Collector) -> None:
    assert main(["export", str(RECORDED / name), "--otlp", collector.url]) == 0
    assert collector.paths == {"/v1/traces"}
    story, spans = tell(read_run(RECORDED / name).events), received(collector.requests)
    traces: dict[bytes, list[tuple[str, Span]]] = {}
    for service, span in spans:
        traces.setdefault(span.trace_id, []).append((service, span))
    assert len(traces) == len(story.requests)
    for own in traces.values():
        whole = next(span for _, span in own if span.name == "llm_request")
        check_request(story, own, attributes(whole)["gen_ai.response.id"])
    gave = {step.step for step in story.steps if step.tokens}
    messages = {(m.sent_ns, m.received_ns) for m in story.messages if m.req is not None or m.step in gave}
    ipc = {
        (nanoseconds(story, s.start_time_unix_nano), nanoseconds(story, s.end_time_unix_nano))
        for _, s in spans if s.name == "ipc"
    }  # fmt: skip
    assert ipc == messages
    texts = sum(e.name == "request.detokenized" for e in read_run(RECORDED / name).events)
    assert sum(s.name == "detokenize" for _, s in spans) == texts


def test_exporting_twice_gives_the_same_spans_and_the_file_holds_them_too(tmp_path: Path) -> None:
    events = read_run(RECORDED / "preemption").events
    first, second = of_events(events), of_events(events)
    assert [span for _, span in first] == [span for _, span in second]
    target = tmp_path / "spans.jsonl"
    assert main(["export", str(RECORDED / "preemption"), "--otlp", str(target)]) == 0
    written = [
        span
        for line in target.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert [(s["traceId"], s["spanId"], s.get("parentSpanId", ""), int(s["endTimeUnixNano"])) for s in written] == [
        (s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(), s.end_time_unix_nano) for _, s in first
    ]


def test_the_clients_own_trace_goes_on() -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    events = read_run(RECORDED / "one_request").events
    for event in events:
        if event.name == "http.request":
            event.args |= {"trace_id": trace_id, "parent_id": parent_id}
    spans = of_events(events)
    assert {span.trace_id.hex() for _, span in spans} == {trace_id}
    (server,) = (span for _, span in spans if span.parent_span_id.hex() == parent_id)
    assert server.kind == Span.SPAN_KIND_SERVER


def test_refused_requests_and_prefix_hits_are_told() -> None:
    hits = [span for _, span in of_events(read_run(RECORDED / "prefix_hits").events) if span.events]
    assert hits and {event.name for span in hits for event in span.events} == {"sched.prefix_hit"}
    events = [e for e in read_run(RECORDED / "one_request").events if e.name in ("run.start", "http.request")]
    asked = events[-1]
    fields = {key: getattr(asked, key) for key in Event.__struct_fields__}
    row = VOCABULARY["request.refused"]
    refused = fields | {
        "name": row.name,
        "phase": row.phase,
        "seq": asked.seq + 1,
        "ts": asked.ts + 1000,
        "cause": None,
    }
    ((_, span),) = of_events([*events, Event(**refused | {"args": {"status": 404, "type": "NotFoundError"}})])
    assert span.status.code == Status.STATUS_CODE_ERROR and span.status.message == "404 NotFoundError"
    assert attributes(span)["http.response.status_code"] == 404


def test_several_answers_without_http_are_one_trace(tmp_path: Path) -> None:
    trace.hold("LLM")
    trace.open(str(tmp_path))
    try:
        with LLM("gpt2-tiny", num_gpu_blocks_override=40) as llm:
            llm.generate("ROMEO:", SamplingParams(temperature=0.8, seed=1, max_tokens=4, n=2))
    finally:
        trace.close()
    events = read_run(tmp_path).events
    spans = of_events(events)
    assert len({span.trace_id for _, span in spans}) == 1
    answers = [
        span for _, span in spans if span.name == "llm_request" and attributes(span)["gen_ai.usage.output_tokens"]
    ]
    assert len(answers) == 2 and len({root_of(attributes(s)["gen_ai.response.id"]) for s in answers}) == 1
    for answer in answers:
        assert {s.name for _, s in spans if s.parent_span_id == answer.span_id} >= {"queue", "prefill", "decode"}


def test_a_collector_that_does_not_answer_or_refuses_is_one_line(
    collector: Collector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(RECORDED / "one_request")
    collector.answer = 400
    closed = Collector()
    closed.close()
    for target in (closed.url, collector.url, "ftp://x", "http://", str(tmp_path / "no" / "file")):
        assert main(["export", run, "--otlp", target]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"stagetrace: error: {target}") and error.count("\n") == 1
