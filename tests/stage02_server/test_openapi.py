"""/openapi.json is true: requests that schemathesis derives from it are answered as it says, and none breaks the server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from endpoints import ENDPOINTS, ask
from fastapi import Request
from jsonschema import validate
from server_under_test import InProcessServer, ServerProcess

from stage02_server.features.page import docs
from stage02_server.features.page.openapi import describe

# All checks but these two. What the schema allows may be too long for the model, or not in its vocabulary; and as in vLLM a number
# may come as a text or a boolean, which the schema does not say.
LENIENCE = "positive_data_acceptance,negative_data_rejection"
NO_END = "/v1/engine/events"  # a stream that goes on as long as the engine
SOUND = "^/v1/audio/"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--disable-uvicorn-access-log")
    url = server.wait_until_ready()
    httpx.get(
        url + "/openapi.json"
    )  # which is made once: schemathesis waits ten seconds for it, and a busy machine takes longer
    yield url
    server.close()


def run_schemathesis(url: str, examples: int, cwd: Path, *selection: str) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--max-examples", str(examples), *selection,
        "--phases", "examples,coverage,fuzzing", "--checks", "all", "--exclude-checks", LENIENCE, "--request-timeout", "300",
        "--no-color", "--generation-database", "none",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=3500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert httpx.post(url + "/v1/completions", json={"prompt": "To be", "max_tokens": 2}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("examples", [5, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_requests_of_every_kind(url: str, examples: int, tmp_path: Path) -> None:
    run_schemathesis(url, examples, tmp_path, "--exclude-path", NO_END, "--exclude-path-regex", SOUND)
    # schemathesis 4.32 fails by itself when it makes wrong forms with a file in them ("Unsupported type: 'Binary'")
    run_schemathesis(url, examples, tmp_path, "--include-path-regex", SOUND, "--mode", "positive")


described = cache(describe)


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if "audio" not in path])
def test_answers_are_as_described(path: str, make_server: Callable[..., InProcessServer]) -> None:
    """A whole answer, and a refusal."""
    config, description = ENDPOINTS[path].config(), described()
    server = make_server(config=config)
    for answer, code in ((ask(server, path), "200"), (ask(server, path, model="other"), "default")):
        content = description["paths"][path]["post"]["responses"][code]["content"]["application/json"]
        assert (answer.status_code == 200) == (code == "200")
        validate(answer.json(), content["schema"] | {"components": description["components"]})


def test_errors_streams_and_empty_answers_are_described(url: str) -> None:
    description = httpx.get(url + "/openapi.json").json()
    for path, operations in description["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            assert "422" not in answers, path
            shape = "AnthropicErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
            assert answers["default"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{shape}")
    completion = description["paths"]["/v1/completions"]["post"]["responses"]["200"]
    assert completion["content"].keys() == {"application/json", "text/event-stream"}
    assert "content" not in description["paths"]["/health"]["get"]["responses"]["200"]
    assert "HTTPValidationError" not in description["components"]["schemas"]
    assert "ErrorInfo" in description["components"]["schemas"]


def test_every_field_and_parameter_is_explained(url: str) -> None:
    description = httpx.get(url + "/openapi.json").json()
    shapes = [("", body["schema"]) for body in bodies(description)] + list(description["components"]["schemas"].items())
    fields = {
        f"{name}.{field}": schema for name, shape in shapes for field, schema in shape.get("properties", {}).items()
    }
    parameters = {
        f"{path} {parameter['name']}": parameter
        for path, operation in routes(description)
        for parameter in operation.get("parameters", ())
    }
    assert len(fields) > 300 and len(parameters) > 3
    assert [name for name, one in (fields | parameters).items() if not one.get("description")] == []
    assert [path for path, operation in routes(description) if not operation.get("description")] == []


def test_every_route_stands_in_a_group_under_a_name(url: str) -> None:
    """In the group of its room, under the beginning of its docstring: not the name of a Python function."""
    description = httpx.get(url + "/openapi.json").json()
    groups = [group["name"] for group in description["tags"]]
    found = {path: operation["tags"] for path, operation in routes(description)}
    assert all(len(tags) == 1 for tags in found.values()) and {tags[0] for tags in found.values()} == set(groups)
    assert (
        groups[:2] == ["Text", "Models"]
        and found["/v1/models"] == ["Models"]
        and found["/v1/score"] == found["/rerank"]
    )
    for path, operation in routes(description):
        name = operation["summary"]
        assert (
            2 < len(name) <= 100
            and name[-1] not in ".,(:;"
            and " ".join(operation["description"].split()).startswith(name)
        ), path
    assert "Create Completion" not in {operation["summary"] for _, operation in routes(description)}


@pytest.mark.parametrize("show", [docs.show_docs, docs.show_redoc])
def test_the_description_is_begun_with_the_page(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(docs, "_openapi", begun.append)
    asyncio.run(show(Request({"type": "http", "root_path": "/llm"})))
    docs.DESCRIBER.submit(lambda: None).result()  # it has one thread
    assert begun == ["/llm"]


def test_the_pages_of_routes_ask_nobody_else(url: str) -> None:
    for page in ("/docs", "/redoc"):
        answer = httpx.get(url + page)
        assert answer.status_code == 200 and "default-src 'none'" in answer.headers["Content-Security-Policy"]
        loaded = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
        assert "/openapi.json" in answer.text and len(loaded) >= 2
        for target in loaded:
            assert target == "data:," or httpx.get(url + target).status_code == 200
    assert httpx.get(url + "/docs/favicon.png").status_code == 404


def routes(description: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(path, operation) for path, operations in description["paths"].items() for operation in operations.values()]


def bodies(description: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        body
        for _, operation in routes(description)
        for body in operation.get("requestBody", {}).get("content", {}).values()
    ]
