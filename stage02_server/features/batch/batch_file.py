"""A batch as files: requests in, answers out, and what is left to do after an interruption (vllm/entrypoints/openai/run_batch.py).

One request per line, as OpenAI's batch interface has it, and one answer per line:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "To be", "max_tokens": 8}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

While a batch runs, its answers go to OUTPUT.partial in the order in which they come; at the end they are written to OUTPUT in
the order of the requests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage03_engine.errors import ConfigError

URLS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/pooling", "/classify", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
"""What a line may ask for: routes that answer with one JSON object."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input. `id` changes with the line, and with what the batch is run with: an answer of an earlier run is
    reused only if both are the same."""

    id: str
    custom_id: str
    url: str
    offset: int  # of the line in the input, bytes

    def body(self, source: Path) -> dict[str, Any]:
        """Read again when its turn comes, so that a large batch does not fill memory."""
        with source.open("rb") as file:
            file.seek(self.offset)
            return json.loads(file.readline())["body"]


def read_requests(source: Path, run_with: str) -> list[BatchRequest]:
    """All requests of a batch. `run_with` names the model and whatever else decides the answers.

    Raises ConfigError that names the first wrong line, before a model is loaded.
    """
    requests, seen, offset = [], dict[str, int](), 0
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        custom_id, url = _checked(line)
                        if custom_id in seen:
                            raise ValueError(f"custom_id {custom_id!r} was used in line {seen[custom_id]}")
                    except ValueError as error:
                        raise ConfigError(f"{source}, line {number}: {error}") from None
                    seen[custom_id] = number
                    digest = hashlib.sha256(run_with.encode() + b"\0" + line.strip()).hexdigest()[:32]
                    requests.append(BatchRequest(f"batch_req_{digest}", custom_id, url, offset))
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"cannot read the batch {source}: {error.strerror or error}") from None
    if not requests:
        raise ConfigError(f"the batch {source} holds no request; write one JSON object per line")
    return requests


def _checked(line: bytes) -> tuple[str, str]:
    """(custom_id, url) of one line. Raises ValueError that says what is wrong."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(request, dict):
        raise ValueError("not a JSON object")
    custom_id, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text that is not empty")
    if request.get("method", "POST") != "POST":
        raise ValueError(f"method must be 'POST', not {request['method']!r}")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, not {url!r}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("a batch has nobody to stream to; leave out stream")
    return custom_id, url


class BatchOutput:
    """The answers of a batch, kept on disk as they come."""

    def __init__(self, path: Path, requests: list[BatchRequest]) -> None:
        """Resumes what an interrupted run left in OUTPUT.partial. Raises ConfigError if it cannot be written."""
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._requests = requests
        self._offsets: dict[str, int] = {}  # id of a request -> where its answer begins in the partial file
        self.statuses: dict[str, int] = {}  # the same -> HTTP status
        try:
            self._file = open(self.partial, "a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.partial} is being written by another run of this batch") from None
        except OSError as error:
            raise ConfigError(f"cannot write {self.partial}: {error.strerror or error}") from None
        self._take_over({request.id for request in requests})
        self.resumed = len(self.statuses)

    def _take_over(self, wanted: set[str]) -> None:
        """Keep the answers of this batch, except those in which the server failed. A torn last line is cut off."""
        self._file.seek(0)
        offset = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                answer = json.loads(line)
                name, status = answer["id"], answer["response"]["status_code"]
            except (ValueError, LookupError, TypeError):
                raise ConfigError(f"{self.partial} is not what an interrupted run leaves; remove it") from None
            if name in wanted and status < 500:
                self._offsets[name], self.statuses[name] = offset, status
            offset += len(line)
        self._file.truncate(offset)

    def open_requests(self) -> Iterator[BatchRequest]:
        """What has no answer yet, in order."""
        return (request for request in self._requests if request.id not in self.statuses)

    def write(self, request: BatchRequest, status: int, request_id: str, body: Any) -> None:
        """Keep an answer; the operating system has it when this returns."""
        answer = {
            "id": request.id,
            "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": body["error"] if status >= 400 else None,
        }
        self._offsets[request.id], self.statuses[request.id] = self._file.seek(0, os.SEEK_END), status
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()

    def finish(self) -> None:
        """Every request has its answer: write OUTPUT, in the order of the input, all at once."""
        new = self.path.with_name(self.path.name + ".new")
        with new.open("wb") as file:
            for request in self._requests:
                self._file.seek(self._offsets[request.id])
                file.write(self._file.readline())
        os.replace(new, self.path)
        self.close()
        self.partial.unlink()

    def close(self) -> None:
        """Leave the partial file for the next run."""
        self._file.close()
