"""A batch as files: requests in, answers out, and what is left to do after an interruption (vllm/entrypoints/openai/run_batch.py).

One request per line, as OpenAI's batch interface has it, and one answer per line:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "To be", "max_tokens": 8}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

A line that is no request gets an answer of status 400 that says why; the others still get theirs.
While a batch runs, its answers go to OUTPUT.partial in the order in which they come; at the end they are written to OUTPUT in
the order of the requests. Both are for this user alone, unless OUTPUT existed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage03_engine.errors import ConfigError, StagesError
from stagetrace.private import private

URLS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/pooling", "/classify", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
"""What a line may ask for: routes that answer with one JSON object."""


MAX_QUOTED = 100  # characters of a wrong value that an error repeats


class BatchWriteError(StagesError):
    """The disk takes no more. The answers so far are kept."""

    exit_code = 1


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input. `id` changes with the line, and with what the batch is run with: an answer of an earlier run is
    reused only if both are the same."""

    id: str
    custom_id: str | None  # None if the line has none that can be used
    url: str
    offset: int  # of the line in the input, bytes
    refusal: str | None = None  # why the line is no request

    def body(self, source: Path) -> bytes:
        """The body as JSON. It is read again when its turn comes, so that a large batch does not fill memory.

        It may hold what only Python takes for JSON, such as NaN: that is for the server to refuse. Raises ConfigError if
        the file cannot be read, ValueError or LookupError if it was changed meanwhile.
        """
        try:
            with source.open("rb") as file:
                file.seek(self.offset)
                line = file.readline()
        except OSError as error:
            raise _cannot("read the batch", source, error) from None
        return json.dumps(json.loads(line)["body"]).encode()


def _cannot(do: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot {do} {path}: {error.strerror or error}")


def read_requests(source: Path, run_with: str) -> list[BatchRequest]:
    """Every line of a batch that is not empty. `run_with` names the model and whatever else decides the answers.

    Raises ConfigError for a file that cannot be read or holds no line.
    """
    requests, seen, offset = [], dict[str, int](), 0
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    requests.append(_read_line(line, number, offset, seen, run_with))
                offset += len(line)
    except OSError as error:
        raise _cannot("read the batch", source, error) from None
    if not requests:
        raise ConfigError(f"the batch {source} holds no request; write one JSON object per line")
    return requests


def _read_line(line: bytes, number: int, offset: int, seen: dict[str, int], run_with: str) -> BatchRequest:
    """The line `number`, which begins at `offset`. `seen` has the number of the line of each custom_id so far."""
    custom_id, url, refusal = None, "", None
    try:
        request = _parsed(line)
        custom_id = _custom_id(request)
        if custom_id in seen:
            raise ValueError(f"custom_id {_quoted(custom_id)} was used in line {seen[custom_id]}")
        seen[custom_id] = number
        url = _checked_url(request)
    except ValueError as error:
        refusal = f"line {number}: {error}"
    key = run_with.encode() + b"\0" + line.strip()
    if refusal is not None:  # equal lines are refused each
        key += b"\0" + refusal.encode("utf-8", "backslashreplace")
    return BatchRequest(f"batch_req_{hashlib.sha256(key).hexdigest()[:32]}", custom_id, url, offset, refusal)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        json.dumps(request)  # as deep as it may be to be sent
    except (ValueError, RecursionError):
        raise ValueError("not JSON, or nested too deeply") from None
    if not isinstance(request, dict):
        raise ValueError("not a JSON object")
    return request


def _custom_id(request: dict[str, Any]) -> str:
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text that is not empty")
    return custom_id


def _checked_url(request: dict[str, Any]) -> str:
    """The url of a line whose other fields are right. Raises ValueError that says what is wrong."""
    url, body = request.get("url"), request.get("body")
    if request.get("method", "POST") != "POST":
        raise ValueError(f"method must be 'POST', not {_quoted(request['method'])}")
    if not isinstance(url, str) or url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, not {_quoted(url)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("a batch has nobody to stream to; leave out stream")
    return url


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


class BatchOutput:
    """The answers of a batch, kept on disk as they come."""

    def __init__(self, path: Path, requests: list[BatchRequest]) -> None:
        """Resumes what an interrupted run left in OUTPUT.partial. Raises ConfigError if it cannot be written."""
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._requests = requests
        self._offsets: dict[str, int] = {}  # id of a request -> where its answer begins in the partial file
        self.statuses: dict[str, int] = {}  # the same -> HTTP status
        try:
            self._file = open(self.partial, "a+b", opener=private)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.partial} is being written by another run of this batch") from None
        except OSError as error:
            raise _cannot("write", self.partial, error) from None
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
                if name in wanted and status < 500:
                    self._offsets[name], self.statuses[name] = offset, status
            except (ValueError, RecursionError, LookupError, TypeError):
                raise ConfigError(f"{self.partial} is not what an interrupted run leaves; remove it") from None
            offset += len(line)
        self._file.truncate(offset)

    def open_requests(self) -> Iterator[BatchRequest]:
        """What has no answer yet, in order."""
        return (request for request in self._requests if request.id not in self.statuses)

    def write(self, request: BatchRequest, status: int, request_id: str, body: Any) -> None:
        """Keep an answer; the operating system has it when this returns. Raises BatchWriteError, and ValueError or
        RecursionError for an answer that cannot be written as JSON, of which nothing is kept."""
        answer = {
            "id": request.id,
            "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": body["error"] if status >= 400 else None,
        }
        line = json.dumps(answer, allow_nan=False).encode() + b"\n"
        with self._full_disk(self.partial):
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        self._offsets[request.id], self.statuses[request.id] = offset, status

    def finish(self) -> None:
        """Every request has its answer: write OUTPUT, in the order of the input, all at once. Raises BatchWriteError."""
        new = self.path.with_name(self.path.name + ".new")
        with self._full_disk(self.path):
            try:
                with open(new, "wb", opener=private) as file:
                    for request in self._requests:
                        self._file.seek(self._offsets[request.id])
                        file.write(self._file.readline())
                if self.path.exists():
                    shutil.copymode(self.path, new)
                os.replace(new, self.path)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        self.close()
        self.partial.unlink()

    @contextmanager
    def _full_disk(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            done, total = len(self.statuses), len(self._requests)
            raise BatchWriteError(
                f"cannot write {path}: {error.strerror or error}; {done} of {total} requests are answered, in "
                f"{self.partial}; the same command goes on from there"
            ) from None

    def close(self) -> None:
        """Leave the partial file for the next run."""
        with suppress(OSError):  # of a full disk: what it has not taken is asked again
            self._file.close()
