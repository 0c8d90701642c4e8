"""The files of a batch: what is refused before a model is loaded, and that no interruption loses or repeats an answer."""

from __future__ import annotations

import asyncio
import json
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from server_under_test import InProcessServer

from stage02_server.features.batch.batch_file import BatchOutput, BatchRequest, read_requests
from stage02_server.features.batch.run_batch import BatchJob, answer_all
from stage03_engine.errors import ConfigError


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes


def write(path: Path, *lines: Any) -> Path:
    texts = [text if isinstance(text, str | bytes) else json.dumps(text) for text in lines]
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts))
    return path


def answer(output: BatchOutput, request: BatchRequest, status: int = 200) -> None:
    output.write(request, status, "id", {"error": {"message": "no"}} if status >= 400 else {"text": request.custom_id})


@pytest.mark.parametrize(
    "bad, custom_id, message",
    [
        ("{", None, "line 2: not JSON"),
        ("[" * 100_000, None, "line 2: not JSON"),
        ("\0\0", None, "line 2: not JSON"),
        (b"\xff{}", None, "line 2: not JSON"),
        ('{"custom_id": "b", "body": {"seed": ' + "9" * 5000 + "}}", None, "line 2: not JSON"),
        ([], None, "line 2: not a JSON object"),
        (line(None), None, "line 2: custom_id must be"),
        (line(7), None, "line 2: custom_id must be"),
        (line(""), None, "line 2: custom_id must be"),
        (line("a"), "a", "line 2: custom_id 'a' was used in line 1"),
        (line("b", method="GET"), "b", "line 2: method must be 'POST'"),
        (line("b", url="/reset_prefix_cache"), "b", "line 2: url must be one of /v1/completions"),
        (line("b", url=["/v1/completions"]), "b", "line 2: url must be one of"),
        (line("b", url="x" * 1_000_000), "b", "line 2: url must be one of"),
        (line("b", body="x"), "b", "line 2: body must be a JSON object"),
        (line("b", body=[]), "b", "line 2: body must be a JSON object"),
        (line("b", body={"stream": True}), "b", "line 2: a batch has nobody to stream to"),
    ],
)
def test_a_wrong_line_is_an_error_of_its_own(bad: Any, custom_id: str | None, message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", line(), bad, bad, line("z"))
    first, wrong, again, last = read_requests(source, "")
    assert first.refusal is last.refusal is None
    assert wrong.refusal is not None and wrong.refusal.startswith(message) and len(wrong.refusal) < 500
    assert wrong.custom_id == custom_id
    assert len({first.id, wrong.id, again.id, last.id}) == 4, "equal lines must not share an answer"


def test_a_batch_without_requests_and_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_requests(write(tmp_path / "in", "", " "), "")
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "none", "")


def test_bodies_are_read_from_their_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("é", body={"n": 1}), "", line("b", body={"n": 2}))
    assert [request.body(source) for request in read_requests(source, "")] == [b'{"n": 1}', b'{"n": 2}']


@given(
    count=st.integers(1, 8),
    runs=st.lists(st.lists(st.tuples(st.integers(0, 7), st.sampled_from([200, 404, 500])), max_size=8), max_size=4),
    torn=st.binary(max_size=20).filter(lambda b: b"\n" not in b),
)
def test_any_interruptions_leave_each_request_one_answer_in_order(
    count: int, runs: list[list[tuple[int, int]]], torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "in", *[line(f"r{i}") for i in range(count)])
        target = Path(folder) / "out"
        requests = read_requests(source, "model")
        stands: dict[str, int] = {}  # custom_id -> status of the answer that must not be asked for again
        for run in runs:
            output = BatchOutput(target, requests)
            assert output.resumed == len(stands)
            for index, status in run:
                request = requests[index % count]
                if request.id not in output.statuses:
                    answer(output, request, status)
                    if status < 500:
                        stands[request.custom_id] = status
            output.close()
            with output.partial.open("ab") as file:
                file.write(torn)
        output = BatchOutput(target, requests)
        left = list(output.open_requests())
        assert [request.custom_id for request in left] == [f"r{i}" for i in range(count) if f"r{i}" not in stands]
        for request in reversed(left):
            answer(output, request)
        output.finish()
        lines = [json.loads(text) for text in target.read_text().splitlines()]
        assert [entry["custom_id"] for entry in lines] == [f"r{i}" for i in range(count)]
        assert all(entry["response"]["status_code"] == stands.get(entry["custom_id"], 200) for entry in lines)
        assert all((entry["error"] is None) == (entry["response"]["status_code"] < 400) for entry in lines)
        assert not output.partial.exists()


def test_another_model_or_another_line_is_asked_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"), line("b"))
    output = BatchOutput(tmp_path / "out", read_requests(source, "model"))
    for request in list(output.open_requests()):
        answer(output, request)
    output.close()
    other = BatchOutput(tmp_path / "out", read_requests(source, "other"))
    assert other.resumed == 0
    other.close()
    write(source, line("a"), line("b", body={"prompt": "y"}))
    changed = BatchOutput(tmp_path / "out", read_requests(source, "model"))
    assert [request.custom_id for request in changed.open_requests()] == ["b"]
    changed.close()


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path / "in", line()), "")
    first = BatchOutput(tmp_path / "out", requests)
    with pytest.raises(ConfigError, match="another run"):
        BatchOutput(tmp_path / "out", requests)
    first.close()


@pytest.mark.parametrize(
    "content",
    [
        "{}\n",
        "[]\n",
        "x\n",
        '{"id": 1, "response": 2}\n',
        '{"id": [], "response": {"status_code": 200}}\n',
        "[" * 100_000 + "\n",
    ],
)
def test_a_partial_file_of_something_else_is_left_alone(content: str, tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text(content)
    with pytest.raises(ConfigError, match="remove it"):
        BatchOutput(tmp_path / "out", read_requests(write(tmp_path / "in", line()), ""))
    assert (tmp_path / "out.partial").read_text() == content


BODIES = st.one_of(
    st.builds(dict, prompt=st.text(max_size=5), max_tokens=st.integers(-1, 3)),
    st.builds(dict, prompt=st.just("x"), temperature=st.floats(), max_tokens=st.just(1)),
    st.just({"prompt": "\ud800"}),
    st.just({"prompt": "x", "user": "\0"}),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2)
    ),
)
LINES = st.one_of(
    st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"")),
    st.builds(line, st.sampled_from(["a", "b", "c", "", None, 7, "\udfff"]), body=BODIES),
    st.builds(line, st.sampled_from("defgh"), body=BODIES, url=st.sampled_from(["/v1/completions", "/health", None])),
)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    server = InProcessServer()
    yield server
    server.close()


def answers_of(server: InProcessServer, *lines: Any) -> list[dict[str, Any]]:
    """What run-batch writes for these lines."""
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "in", *lines)
        requests = read_requests(source, "")
        output = BatchOutput(Path(folder) / "out", requests)
        server.run(answer_all(server.app, BatchJob(source, output, len(requests), 3)))
        output.finish()
        return [json.loads(text, parse_constant=pytest.fail) for text in output.path.read_text().splitlines()]


def without_names(entry: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in entry["response"]["body"].items() if name not in ("id", "created")}
    return {"custom_id": entry["custom_id"], "status": entry["response"]["status_code"], "body": body}


@given(st.lists(LINES, min_size=1, max_size=8))
def test_each_line_has_one_answer_and_good_lines_the_one_that_they_have_alone(
    server: InProcessServer, lines: list[Any]
) -> None:
    lines = [each for each in lines if not isinstance(each, bytes) or each.strip()] or ["{"]
    answers = answers_of(server, *lines)
    assert len(answers) == len(lines)
    seen = set()
    for each, entry in zip(lines, answers, strict=True):
        name = each.get("custom_id") if isinstance(each, dict) else None
        assert (entry["error"] is None) == (entry["response"]["status_code"] < 400)
        assert entry["response"]["status_code"] != 500
        if isinstance(each, dict) and isinstance(name, str) and name and name not in seen:
            assert entry["custom_id"] == name
            (alone,) = answers_of(server, each)
            if "line 1:" not in str(alone["error"]):  # the number of a line that is no request differs
                assert without_names(entry) == without_names(alone)
        seen.add(name)


def test_numbers_that_json_does_not_have_and_what_cannot_be_encoded_are_refused_like_over_http(
    server: InProcessServer,
) -> None:
    begin = '{"custom_id": "%s", "url": "/v1/completions", "body": '
    bodies = ['{"prompt": "x", "temperature": NaN}', '{"prompt": "x", "temperature": 1e999}', '{"prompt": "\\ud800"}']
    lines = [begin % number + body + "}" for number, body in enumerate(bodies)]
    deep = begin % "deep" + '{"prompt": "x", "logit_bias": ' + '{"a":' * 900 + "1" + "}" * 900 + "}}"
    long = line("long", body={"prompt": "x" * 10_000_000})
    *wrong, good = answers_of(server, *lines, deep, long, line("good", body={"prompt": "x", "max_tokens": 1}))
    assert [entry["response"]["status_code"] for entry in wrong] == [400, 400, 400, 400, 413]
    for entry, body in zip(wrong, bodies, strict=False):
        headers = {"Content-Type": "application/json"}
        over_http = server.request("POST", "/v1/completions", content=body, headers=headers).json()
        assert entry["error"] == over_http["error"]
    assert good["response"]["status_code"] == 200


def test_an_answer_that_cannot_be_written_is_an_error_of_its_line(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Answers with a number that JSON does not have, then with none at all, then as it should."""
        body = bodies.pop(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    bodies = [b'{"a": NaN}', b"\xff", b"[1]"]
    source = write(tmp_path / "in", line("a"), line("b"), line("c"))
    output = BatchOutput(tmp_path / "out", requests := read_requests(source, ""))
    asyncio.run(answer_all(app, BatchJob(source, output, len(requests), 1)))
    output.finish()
    first, second, third = map(json.loads, output.path.read_text().splitlines())
    assert [entry["response"]["status_code"] for entry in (first, second, third)] == [500, 500, 200]
    assert "ValueError" in first["error"]["message"] and "UnicodeDecodeError" in second["error"]["message"]
    assert third["response"]["body"] == [1]


def test_files_are_for_their_owner_alone_unless_they_were_there(tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path / "in", line()), "")
    for before, after in ((None, 0o600), (0o644, 0o644)):
        if before is not None:
            (tmp_path / "out").chmod(before)
        output = BatchOutput(tmp_path / "out", requests)
        assert stat.S_IMODE(output.partial.stat().st_mode) == 0o600
        answer(output, requests[0])
        output.finish()
        assert stat.S_IMODE(output.path.stat().st_mode) == after
