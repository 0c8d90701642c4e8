"""The client's trace goes on in ours; responses name the request that they answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from server_under_test import InProcessServer

from stage02_server.features.traceparent.traceparent import parse_traceparent
from stagetrace import read_run, root_of, trace

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"
HEX = st.text("0123456789abcdef")


@pytest.mark.parametrize(
    "value", [GOOD, GOOD[:-2] + "00", f"cc-{TRACE}-{PARENT}-01", f"cc-{TRACE}-{PARENT}-01-what-else", f"01-{TRACE}-{PARENT}-01-"]
)  # fmt: skip
def test_valid(value: str) -> None:
    assert parse_traceparent([value]) == (TRACE, PARENT)


@pytest.mark.parametrize(
    "values",
    [
        [], [""], [GOOD, GOOD], [GOOD + "-x"], [GOOD + "x"], [GOOD + " "], [GOOD.upper()], ["ff" + GOOD[2:]], [GOOD[:-1]], ["0" + GOOD],
        [f"00-{'0' * 32}-{PARENT}-01"], [f"00-{TRACE}-{'0' * 16}-01"], [GOOD.replace("-", "_")], [f"cc-{TRACE}-{PARENT}-01x"],
        [GOOD + "\n"], [GOOD.replace("b", "\u0661")], [f"00-{TRACE[:-1]}g-{PARENT}-01"],
    ],
)  # fmt: skip
def test_malformed(values: list[str]) -> None:
    assert parse_traceparent(values) == (None, None)


@given(st.text(max_size=70) | st.tuples(HEX, HEX, HEX, HEX).map("-".join))
def test_whatever_comes_is_two_ids_or_none(value: str) -> None:
    trace_id, parent_id = parse_traceparent([value])
    assert (trace_id is None) == (parent_id is None)
    if trace_id is not None and parent_id is not None:
        assert len(trace_id) == 32 and len(parent_id) == 16 and value[2:].startswith(f"-{trace_id}-{parent_id}-")


def test_requests_are_joined_with_their_responses_and_the_clients_trace(tmp_path: Path) -> None:
    trace.close()  # whatever another test has left
    trace.open(str(tmp_path))
    server = InProcessServer()
    try:
        body = {"prompt": ["ab", "cd"], "max_tokens": 3, "n": 2, "temperature": 1.0}
        server.post("/v1/completions", body | {"stream": True}, headers={"traceparent": GOOD})
        server.post("/v1/completions", body, headers={"traceparent": "00-xyz"})
        server.post("/v1/completions", {"prompt": ""})
        server.request("GET", "/health")
    finally:
        server.close()
        trace.close()
    run = read_run(tmp_path)
    requests = run.named("http.request")
    streamed, whole, refused = (event for event in requests if event.args["path"] == "/v1/completions")
    health = next(event for event in requests if event.args["path"] == "/health")
    assert (streamed.args["trace_id"], streamed.args["parent_id"]) == (TRACE, PARENT)
    assert {(e.args["trace_id"], e.args["parent_id"]) for e in (whole, refused, health)} == {(None, None)}
    chunks = run.named("sse.chunk")
    assert len(chunks) >= 7 and {e.cause for e in chunks} == {streamed.ref}
    assert {e.req for e in chunks} == {streamed.req, (streamed.req or "")[:-1] + "1"}
    ours = [e.ref for e in (whole, refused, health)]
    assert [e.cause for e in run.named("http.response") if e.cause in ours] == ours
    roots = {root_of(event.req) for event in run.events if event.req}
    assert roots == {root_of(each.req or "") for each in (streamed, whole, refused)}
    children = {e.req for e in run.named("request.finished") if e.req and root_of(e.req) == root_of(whole.req or "")}
    assert children == {f"{i}_{root_of(whole.req or '')}-{p}" for i in (0, 1) for p in (0, 1)}
