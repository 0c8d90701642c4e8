"""Every route of vLLM is either served or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from server_under_test import InProcessServer

from stage02_server.features.refusals.refusals import ABSENT

VLLM_ROUTES = """
GET /version, GET /kv_event_sources, GET /health, GET /metrics, POST /tokenize, POST /detokenize, GET /v1/models,
POST /v1/systemone, POST /v1/decisions, GET /ping, POST /invocations, POST /v1/chat/completions,
POST /v1/chat/completions/batch, POST /v1/responses, GET /v1/responses/resp_1, POST /v1/responses/resp_1/cancel,
POST /v1/completions, POST /v1/messages, POST /v1/messages/count_tokens, POST /generative_scoring,
POST /scale_elastic_ep, POST /is_scaling_elastic_ep
"""
"""What vLLM 0.33 has for a model that writes text."""


@pytest.mark.parametrize("route", [route.strip() for route in VLLM_ROUTES.split(",")])
def test_no_route_of_vllm_is_unknown(server: InProcessServer, route: str) -> None:
    method, path = route.split()
    answer = server.request(method, path)
    kind = answer.json()["error"]["type"] if answer.status_code >= 400 else None
    assert kind not in ("Not Found", "Method Not Allowed"), "the framework's words for a route that nobody registered"


@pytest.mark.parametrize("path", ABSENT)
@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "unknown", "messages": []}', b"\xff" * 100])
def test_refused_with_the_reason_whatever_the_body(server: InProcessServer, path: str, body: bytes) -> None:
    method, reason = ABSENT[path]
    answer = server.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", None, 404)
    assert path in error["message"] and reason in error["message"]


def test_a_limit_of_the_queue_leaves_the_refusals_as_they_are(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server(max_num_queued_reqs=1)
    for path, (method, _) in ABSENT.items():
        assert server.request(method, path, content=b"{}").status_code == 404, path


def test_absent_routes_are_not_in_the_schema_and_take_no_other_method(server: InProcessServer) -> None:
    schema = server.request("GET", "/openapi.json").json()
    assert not ABSENT.keys() & schema["paths"].keys() and "/v1/responses/{response_id}" in schema["paths"]
    for path, (method, _) in ABSENT.items():
        assert server.request("GET" if method == "POST" else "POST", path).status_code == 405
