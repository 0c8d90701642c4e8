"""Nothing can be asked of the server that nobody bounds: LIMITS.md names every limit, route and field, and each is tried.

What is enumerated here comes from the code: the flags from the settings, the routes from the routers, the fields from /openapi.json.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from server_under_test import ServerProcess

import stage02_server
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.page.openapi import describe
from stage02_server.features.pooling import routes as pooling
from stage02_server.features.router.command import RouterFlags
from stage03_engine.args.fields import settings_of
from stage03_engine.config import VllmConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "stage02_server/features/hardening/LIMITS.md"
A_LIMIT = re.compile(r"^(max_|h11_max|grammar_)|(_timeout|_seconds|_secs|_bytes|_alive)$")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    [section] = [part for part in PAGE.read_text().split("\n## ") if part.startswith(heading + "\n")]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def flags() -> set[str]:
    """All settings of the server, of its engine, and of the router."""
    sections = [FrontendArgs, RouterFlags, *(type(getattr(VllmConfig(), each.name)) for each in fields(VllmConfig))]
    return {setting.name for section in sections for setting in settings_of(section)}


@cache
def routes() -> frozenset[str]:
    """METHOD and path of all routes in the stage, served or not."""
    found = set()
    for module in pkgutil.walk_packages(stage02_server.__path__, "stage02_server."):
        if not module.name.endswith("__main__"):
            for value in vars(import_module(module.name)).values():
                if isinstance(value, APIRouter):
                    found |= {f"{method} {route.path}" for route in value.routes for method in route.methods}  # type: ignore[attr-defined]
    return frozenset(found)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@cache
def request_fields() -> dict[str, dict[str, dict[str, Any]]]:
    """Path -> the shape -> its fields, of each body and of all that is within."""
    description, found = describe(), {}
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        shapes: dict[str, dict[str, Any]] = {}
        waiting = [name for operation in operations.values() for name in references(operation.get("requestBody", {}))]
        while waiting:
            if (name := waiting.pop()) not in shapes:
                shapes[name] = schemas[name].get("properties", {})
                waiting += references(schemas[name])
        found[path] = shapes
    return found


def test_every_limit_has_a_row() -> None:
    named_flags = {flag for cells in rows("Resources") for flag in named(cells[3])}
    limits = {name for name in flags() if A_LIMIT.search(name)}
    assert limits > {"max_request_bytes", "grammar_step_seconds", "timeout_keep_alive", "trace_max_bytes"}
    assert {"--" + name.replace("_", "-") for name in limits} == named_flags


def test_every_row_names_a_test_and_a_file_that_are_there() -> None:
    tests = {file.stem for file in (ROOT / "tests").rglob("test_*.py")}
    files = [str(file) for file in ROOT.glob("[st]*/**/*.py")]
    for cells in rows("Resources"):
        assert all(cells[:3]), cells
        assert set(re.findall(r"`(test_\w+)`", cells[4])) <= tests and "test_" in cells[4], cells
        for name in named(cells[1]):
            assert any(file.endswith("/" + name) for file in files), name


def test_every_route_and_method_has_one_row() -> None:
    listed = Counter(route for cells in rows("Routes") for route in named(cells[0]))
    assert set(listed.values()) == {1}
    assert routes() == set(listed)


def test_every_field_has_one_row() -> None:
    listed = Counter(field for cells in rows("Fields of requests") for field in named(cells[0]))
    assert [field for field, count in listed.items() if count > 1] == []
    found = {field for shapes in request_fields().values() for each in shapes.values() for field in each}
    assert found >= {"prompt", "encrypted_content", "logit_bias"} and found == set(listed)


@pytest.mark.parametrize("heading", ["Resources", "Routes", "Fields of requests"])
def test_flags_that_the_page_names_are_there(heading: str) -> None:
    words = {word for cells in rows(heading) for cell in cells for word in named(cell) if word.startswith("--")}
    assert {word.removeprefix("--").replace("-", "_") for word in words} <= flags()


SIZE = 100_000
SHAPES: dict[str, Any] = {
    "a long text": "a" * SIZE,
    "a text of line ends": "\n" * SIZE,
    "many numbers": [7] * SIZE,
    "many texts": ["a"] * 60_000,
    "many objects": [{"type": "text", "text": "a", "role": "user", "content": "b"}] * 16_000,
    "many keys": {str(number): 1 for number in range(60_000)},
    "a deep list": "[" * 300 + "]" * 300,
    "a long number": 10**600,
}


def bodies(path: str, all_shapes: bool) -> Iterator[tuple[str, bytes]]:
    """(what, body): each field of the body with each shape, or with one, beside what the route needs."""
    shapes = request_fields()[path]
    least = {"prompt": "a", "input": "a", "max_tokens": 1, "max_output_tokens": 1, "model": "gpt2-tiny", "tokens": [1]}
    least["messages"] = [{"role": "user", "content": "a"}]
    own = sorted({field for name in shapes if "Request" in name for field in shapes[name]})
    for number, field in enumerate(own):
        rest = json.dumps({name: value for name, value in least.items() if name != field})
        for what, text in [*TEXTS.items()][slice(None) if all_shapes else slice(turn := number % len(TEXTS), turn + 1)]:
            yield f"{field}: {what}", f'{rest[:-1]}, "{field}": {text}}}'.encode()


TEXTS = {what: value if what == "a deep list" else json.dumps(value) for what, value in SHAPES.items()}
POOLING = {path for route in pooling.router.routes if (path := getattr(route, "path", ""))}


def served() -> list[str]:
    return sorted(path for path, shapes in request_fields().items() if shapes and not path.startswith("/v1/audio"))


def start(*flags: str) -> ServerProcess:
    server = ServerProcess(
        "gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", "--disable-uvicorn-access-log", *flags
    )
    server.wait_until_ready()
    return server


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """When it ends, nothing may have kept its event loop."""
    server = start("--server-dev-mode")
    yield server
    server.close()


@pytest.fixture(scope="module")
def pooling_server() -> Iterator[ServerProcess]:
    server = start("--runner", "pooling")
    yield server
    server.close()


@pytest.mark.parametrize("all_shapes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_field_of_any_shape_keeps_the_event_loop(
    all_shapes: bool, server: ServerProcess, pooling_server: ServerProcess
) -> None:
    """The server's watch looks on: see `ServerProcess.close`."""
    for path in served():
        with httpx.Client(base_url=(pooling_server if path in POOLING else server).url) as client:
            for what, body in bodies(path, all_shapes):
                answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
                assert answer.status_code < 500, (path, what, answer.text[:300])
            assert client.get("/health").status_code == 200


@pytest.mark.slow(keep=("POST", "PURGE"))
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE"])
def test_every_route_answers_every_method(server: ServerProcess, method: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        for path in sorted({route.partition(" ")[2] for route in routes()} - {"/v1/engine/events"}):
            for content in (b"", b"[" * 1000, b"{}"):
                answer = client.request(method, path, content=content, headers={"Content-Type": "application/json"})
                assert answer.status_code in (200, 400, 404, 405, 409), (path, answer.text)
