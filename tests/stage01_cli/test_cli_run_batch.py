"""`stages run-batch` from outside: the same answers as over HTTP, and an interruption that costs nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage01_cli.main import main

BODIES = [
    ("/v1/completions", {"prompt": "To be, or", "max_tokens": 6, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 3}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"model": "nobody", "prompt": "x"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, "temperature": 0}),
]
SMALL = ["gpt2-tiny", "--kv-cache-memory-bytes", "20000000", "--max-model-len", "256"]


def write(path: Path, bodies: list[tuple[str, dict[str, Any]]]) -> Path:
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "stage01_cli", "run-batch", *map(str, words)]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=PATIENCE)


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two equal requests."""
    kept = {name: value for name, value in body.items() if name not in ("id", "created")}
    if "usage" in kept:
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name != "prompt_tokens_details"}
    return kept


def test_a_batch_is_answered_as_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGES_API_KEY", "secret")  # for those who come over HTTP
    monkeypatch.setenv("STAGES_MAX_NUM_QUEUED_REQS", "1")
    source = write(tmp_path / "in.jsonl", BODIES)
    done = run(*SMALL, "--engine", "echo", "-i", source, "-o", tmp_path / "out.jsonl", "--trace", tmp_path / "trace")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"3 answered, 2 refused; written to {tmp_path}/out.jsonl\n"
    monkeypatch.undo()
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    server = ServerProcess(*SMALL, "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
    try:
        url = server.wait_until_ready()
        for index, (path, body) in enumerate(BODIES):
            expected = httpx.post(url + path, json=body)
            answer = answers[index]
            assert answer["custom_id"] == f"r{index}"
            assert answer["response"]["status_code"] == expected.status_code
            assert without_names(answer["response"]["body"]) == without_names(expected.json())
            assert answer["error"] == expected.json().get("error")
    finally:
        server.close()
    events = [json.loads(line) for path in (tmp_path / "trace").glob("APIServer*") for line in path.open()]
    args = {event["name"]: event.get("args") for event in events}
    assert args["batch.started"] == {"requests": 5, "resumed": 0}
    assert args["batch.finished"] == {"requests": 5, "refused": 2}


@pytest.mark.slow(keep="echo")
@pytest.mark.parametrize("engine, interruption", [("echo", "SIGTERM"), ("core", "the engine died")])
def test_an_interrupted_batch_goes_on_where_it_was(engine: str, interruption: str, tmp_path: Path) -> None:
    lengths = [1, 150, 150, 150]
    bodies = [("/v1/completions", {"prompt": "To be", "max_tokens": n, "ignore_eos": True}) for n in lengths]
    source, target = write(tmp_path / "in.jsonl", bodies), tmp_path / "out.jsonl"
    words = [*SMALL, "--engine", engine, "--max-inflight", "1", "-i", source, "-o", target]
    partial = tmp_path / "out.jsonl.partial"
    with subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (partial.exists() and partial.read_text().endswith("\n")):
                with pytest.raises(subprocess.TimeoutExpired):  # it must still run
                    process.wait(timeout=0.005)
            if interruption == "SIGTERM":
                process.send_signal(signal.SIGTERM)
            else:
                for child in psutil.Process(process.pid).children():
                    child.kill()
            _, error = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == 1
    last = error.splitlines()[-1]
    assert last.startswith(f"stages: error: {interruption}: ") and "of 4 requests are answered" in last
    first = partial.read_text()
    assert 1 <= first.count("\n") < 4 and not target.exists()
    done = run(*words)
    assert (done.returncode, done.stdout) == (0, f"4 answered, 0 refused; written to {target}\n")
    assert target.read_text().startswith(first)  # with the ids of the first run: not asked again


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
from stage01_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """Files of at most 1,500 bytes: two of four answers."""
    bodies = [("/v1/completions", {"prompt": "To be", "max_tokens": 1}) for _ in range(4)]
    source, target = write(tmp_path / "in.jsonl", bodies), tmp_path / "out.jsonl"
    words = [*SMALL, "--engine", "echo", "--max-inflight", "1", "-i", source, "-o", target]
    full = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "run-batch", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert full.returncode == 1 and "Traceback" not in full.stderr
    last = full.stderr.splitlines()[-1]
    assert (
        last.startswith(f"stages: error: cannot write {target}.partial: File too large; ") and "of 4 requests" in last
    )
    assert not target.exists()
    done = run(*words)
    assert (done.returncode, done.stdout) == (0, f"4 answered, 0 refused; written to {target}\n"), done.stderr


def test_what_is_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", BODIES)
    for words, message in (
        (["-i", tmp_path / "none", "-o", tmp_path / "out"], "No such file"),
        (["-i", source, "-o", tmp_path / "none" / "out"], "cannot write"),
        (["-i", "https://example.org/in", "-o", tmp_path / "out"], "only local files"),
        (["-i", source, "-o", tmp_path / "out", "--max-inflight", "0"], "max_inflight must be at least 1"),
    ):
        assert main(["run-batch", "gpt2-tiny", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("stages: error: ") and err.count("\n") == 1 and message in err
