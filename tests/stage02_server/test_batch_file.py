"""The files of a batch: what is refused before a model is loaded, and that no interruption loses or repeats an answer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage02_server.features.batch.batch_file import BatchOutput, BatchRequest, read_requests
from stage03_engine.errors import ConfigError


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return path


def answer(output: BatchOutput, request: BatchRequest, status: int = 200) -> None:
    output.write(request, status, "id", {"error": {"message": "no"}} if status >= 400 else {"text": request.custom_id})


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ([], "line 2: not a JSON object"),
        (line(7), "line 2: custom_id must be"),
        (line(""), "line 2: custom_id must be"),
        (line("a"), "line 2: custom_id 'a' was used in line 1"),
        (line("b", method="GET"), "line 2: method must be 'POST'"),
        (line("b", url="/reset_prefix_cache"), "line 2: url must be one of /v1/completions"),
        (line("b", url=["/v1/completions"]), "line 2: url must be one of"),
        (line("b", body="x"), "line 2: body must be a JSON object"),
        (line("b", body={"stream": True}), "line 2: a batch has nobody to stream to"),
    ],
)
def test_a_wrong_line_is_named(bad: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_requests(write(tmp_path / "in", line(), bad), "")


def test_a_batch_without_requests_and_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_requests(write(tmp_path / "in", "", " "), "")
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "none", "")


def test_bodies_are_read_from_their_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("é", body={"n": 1}), "", line("b", body={"n": 2}))
    assert [request.body(source) for request in read_requests(source, "")] == [{"n": 1}, {"n": 2}]


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


@pytest.mark.parametrize("content", ["{}\n", "[]\n", "x\n", '{"id": 1, "response": 2}\n'])
def test_a_partial_file_of_something_else_is_left_alone(content: str, tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text(content)
    with pytest.raises(ConfigError, match="remove it"):
        BatchOutput(tmp_path / "out", read_requests(write(tmp_path / "in", line()), ""))
    assert (tmp_path / "out.partial").read_text() == content
