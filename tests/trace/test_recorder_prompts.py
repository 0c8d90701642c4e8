"""Nothing that a client wrote or received is in a recording, unless `--trace-prompts` says so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from patience import PATIENCE
from server_under_test import InProcessServer

from stage02_server.api_server import served_paths
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run, trace

PROMPT, STOP, STOP_IDS = "KING RICHARD: zebra", "And I am I", [1711, 1722]


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    server = InProcessServer()
    yield server
    server.close()


def recorded(folder: Path, prompts: bool) -> tuple[str, str]:
    """(all that the trace says, the answer)"""
    settings = {"kv_cache_memory_bytes": 20_000_000, "device": "cpu", "trace": str(folder), "trace_prompts": prompts}
    with LLM("gpt2-tiny", **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, stop=[STOP], stop_token_ids=STOP_IDS)
        answer = llm.generate(PROMPT, params)[0].outputs[0].text
    return "".join(path.read_text() for path in folder.glob("*.jsonl")), answer


def test_without_leave_neither_text_nor_token_ids(tmp_path: Path) -> None:
    said, answer = recorded(tmp_path, prompts=False)
    words = {word for word in [*PROMPT.split(), *answer.split(), STOP] if len(word) > 3}
    assert len(words) >= 5 and not {word for word in words if word in said}
    for event in read_run(tmp_path).events:
        assert event.args.get("token_ids", []) == [] and event.args.get("stop") is None
        assert event.args.get("params", {}).get("stop_token_ids", []) == []
    assert read_run(tmp_path).events[0].args["prompts"] is False


def test_with_leave_the_whole_conversation(tmp_path: Path) -> None:
    _, answer = recorded(tmp_path, prompts=True)
    run = read_run(tmp_path)
    [tokenized] = run.named("request.tokenized")
    assert tokenized.args["prompt"] == PROMPT and len(tokenized.args["token_ids"]) == tokenized.args["num_tokens"]
    texts = [event.args["text"] for event in run.named("request.detokenized")]
    assert "".join(texts) == answer
    sampled = [i for event in run.named("sched.token") for i in event.args["token_ids"]]
    assert sampled == [i for event in run.named("request.detokenized") for i in event.args["token_ids"]]
    assert [event.args["stop"] for event in run.named("request.stop_matched")] == [STOP] and answer == "lst,\n"
    assert run.named("sched.queued")[0].args["params"]["stop_token_ids"] == STOP_IDS


@pytest.mark.parametrize(
    "flags", [[], ["--trace-prompts", "--trace-console", "--multiprocess"]], ids=["without", "with"]
)
def test_the_prompt_on_a_command_line_is_a_prompt(flags: list[str], tmp_path: Path) -> None:
    words = ["generate", "gpt2-tiny", PROMPT, "--stop", STOP, "--max-tokens", "3", "--kv-cache-memory-bytes", "20M"]
    command = [sys.executable, "-m", "stage03_engine", *words, "--trace", str(tmp_path), *flags]
    pipe = subprocess.PIPE  # one for both, as a terminal is
    done = subprocess.run(command, check=True, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE)
    lines = done.stdout.splitlines()
    shown = [
        line for line in lines if re.match(r"(LLM|EngineCore_DP0) +\d\d:\d\d:\d\d\.\d{6} phase \d \[TRACE\] \(", line)
    ]
    assert bool(shown) == ("--trace-console" in flags)
    assert "".join(line for line in lines if line not in shown).startswith(PROMPT), "no event stands inside the text"
    [start] = [e for e in read_run(tmp_path).events if e.name == "run.start" and e.proc == "LLM"]
    assert (PROMPT in start.args["argv"], STOP in start.args["argv"]) == (bool(flags), bool(flags))
    assert "--max-tokens" in start.args["argv"]


def test_an_http_body_leaves_nothing(tmp_path: Path) -> None:
    trace.open(str(tmp_path))
    server = InProcessServer()
    try:
        for body in (
            {"prompt": "giraffe", "max_tokens": 4, "stop": ["okapi"], "user": "tapir"},
            {"prompt": "giraffe", "max_tokens": 0},
            {"prompt": "giraffe", "model": "tapir"},
            {"prompt": {"giraffe": 1}},
            {"messages": [{"role": "user", "content": "okapi"}]},
        ):
            server.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
        secret = {"Authorization": "Bearer tapir", "Cookie": "okapi"}
        server.request("GET", "/v1/models?token=giraffe", headers=secret)
    finally:
        server.close()
        trace.close()
    run = read_run(tmp_path)
    first = run.named("generate.start")[0].args["sampling_params"]
    assert first == {"max_tokens": 4, "stop": "***", "output_kind": 2, "stream_interval": 1}
    said = json.dumps([event.args for event in run.events])
    assert "http.request" in {e.name for e in run.events}
    assert not [word for word in ("giraffe", "okapi", "tapir") if word in said]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/a%0a[TRACE]%1b[31m%c2%9b%e2%80%ae", "/a\\n[TRACE]\\x1b[31m\\x9b\\u202e"),
        ("/" + "a" * 255, "/" + "a" * 255),
        ("/" + "a" * 256, "/" + "a" * 252 + "..."),
        ("/" + "%00" * 200, "/" + "\\x00" * 63 + "..."),
        ("/" + "%0a" * 100_000, "/" + "\\n" * 126 + "..."),
    ],
    ids=["steers", "long", "too long", "short until it is escaped", "very long"],
)
def test_the_path_is_bounded_and_escaped(
    path: str, shown: str, tmp_path: Path, server: InProcessServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Anybody can choose it, without any key."""
    trace.open(str(tmp_path), console=True)
    try:
        scope = {
            "type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(), "query_string": b"", "headers": [],
            "root_path": "", "scheme": "http", "server": ("test", 80), "client": None, "http_version": "1.1",
        }  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        server.run(server.app(scope, receive, send))
    finally:
        trace.close()
    assert sent[0]["status"] == 404
    [event] = read_run(tmp_path).named("http.request")
    assert event.args["path"] == shown and len(shown) <= 256
    lines = [line for line in capfd.readouterr().err.splitlines() if "http.request" in line]
    assert len(lines) == 1 and lines[0].isprintable() and f"path={shown} " in lines[0]


@pytest.mark.parametrize("name", ["a" * 129, "a\n", "a\x1b[31m", "\x9b", ""], ids=ascii)
def test_an_id_that_could_do_harm_is_not_taken(name: str, tmp_path: Path, server: InProcessServer) -> None:
    trace.open(str(tmp_path))
    try:
        body = {"prompt": "x", "max_tokens": 1}
        asked = server.post("/v1/completions", body | {"request_id": name})
        headed = server.post("/v1/completions", body, headers={"X-Request-Id": name.encode("latin-1")})  # type: ignore[dict-item]
        taken = server.post("/v1/completions", body | {"request_id": "b" * 128})
    finally:
        trace.close()
    assert (asked.status_code, headed.status_code, taken.json()["id"]) == (400, 200, "cmpl-" + "b" * 128)
    ids = {event.req for event in read_run(tmp_path).events if event.req} | {headed.json()["id"]}
    assert all((len(each) < 160 and each.isprintable() and name not in each) or not name for each in ids)


def test_generate_tells_every_parameter_that_is_not_a_default_and_counts_its_outputs(tmp_path: Path) -> None:
    trace.open(str(tmp_path), prompts=True)
    server = InProcessServer()
    try:
        chosen = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "n": 2, "seed": 3, "stop": ["okapi"]}
        body = {"max_tokens": 3, "presence_penalty": 0.5, "logit_bias": {"5": 1.0}, "ignore_eos": True} | chosen
        server.post("/v1/completions", {"prompt": "abc", "stream": True} | body)
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2})
    finally:
        server.close()
        trace.close()
    run = read_run(tmp_path)
    first, second = (event.args["sampling_params"] for event in run.named("generate.start"))
    assert {name: first[name] for name in chosen} == chosen and first["presence_penalty"] == 0.5
    assert first["logit_bias"] == {"5": 1.0} and first["ignore_eos"] is True and first["max_tokens"] == 3
    assert "top_p" not in second and "temperature" not in second, "a default is not told"
    request_id = run.named("generate.start")[0].req
    yields = [event.args for event in run.named("generate.yield") if event.req == request_id]
    assert [args["number"] for args in yields] == list(range(1, len(yields) + 1))
    assert [args["finished"] for args in yields] == [False] * (len(yields) - 1) + [True]
    assert [event.args for event in run.named("stat_loggers.created")] == [{"loggers": ["PrometheusStatLogger"]}]
    assert sum(event.args["generation_tokens"] for event in run.named("stats.recorded")) == 2 * 3 + 2
    assert sum(event.args["finished"] for event in run.named("stats.recorded")) == 2 + 1
    assert [event.args["engine_ranks"] for event in run.named("client.created")] == [[]], "the echo engine has none"
    chat = [event.name for event in run.events if event.req == run.named("tokenizer.requested")[0].req]
    assert chat.index("request.validated") < chat.index("tokenizer.requested") < chat.index("request.templated")
    paths = served_paths(server.app.routes)
    assert run.named("server.state_ready")[0].args["paths"] == len(paths)
    assert {"/v1/completions", "/v1/models/{name:path}", "/metrics", "/docs"} <= paths, "the features' are among them"
    assert "/v1/embeddings" not in paths, "refused: it needs another model"
