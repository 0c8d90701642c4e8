"""/openapi.json is true: requests that schemathesis derives from it are answered as it says, and none breaks the server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_under_test import ServerProcess

LIMITS = "positive_data_acceptance"  # what the schema allows may be too long for the model, or not in its vocabulary
NO_END = "/v1/engine/events"  # a stream that goes on as long as the engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--disable-uvicorn-access-log")
    yield server.wait_until_ready()
    server.close()


def run_schemathesis(url: str, phases: str, examples: int, timeout: int, cwd: Path) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--max-examples", str(examples), "--phases", phases,
        "--exclude-path", NO_END, "--checks", "all", "--exclude-checks", LIMITS, "--request-timeout", "20", "--no-color", "--generation-database", "none",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert httpx.post(url + "/v1/completions", json={"prompt": "To be", "max_tokens": 2}, timeout=30).status_code == 200


@pytest.mark.parametrize("examples", [5, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_requests_of_every_kind(url: str, examples: int, tmp_path: Path) -> None:
    run_schemathesis(url, "examples,coverage,fuzzing", examples, 3500, tmp_path)


def test_errors_streams_and_empty_answers_are_described(url: str) -> None:
    description = httpx.get(url + "/openapi.json").json()
    for path, operations in description["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            assert "422" not in answers, path
            assert answers["default"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")
    completion = description["paths"]["/v1/completions"]["post"]["responses"]["200"]
    assert completion["content"].keys() == {"application/json", "text/event-stream"}
    assert "content" not in description["paths"]["/health"]["get"]["responses"]["200"]
    assert "HTTPValidationError" not in description["components"]["schemas"]
    assert "ErrorInfo" in description["components"]["schemas"]
