"""Nothing that a client wrote or received is in a recording, unless `--trace-prompts` says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from server_under_test import InProcessServer

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stage03_engine.tracing import open_trace
from stagetrace import read_run, trace

PROMPT, STOP, STOP_IDS = "KING RICHARD: zebra", "And I am I", [1711, 1722]


def recorded(folder: Path, prompts: bool) -> tuple[str, str]:
    """(all that the trace says, the answer)"""
    settings = {"kv_cache_memory_bytes": 20_000_000, "device": "cpu", "trace": str(folder), "trace_prompts": prompts}
    with LLM("gpt2-tiny", **settings) as llm:
        open_trace(llm.vllm_config)
        try:
            params = SamplingParams(temperature=0, max_tokens=60, stop=[STOP], stop_token_ids=STOP_IDS)
            answer = llm.generate(PROMPT, params)[0].outputs[0].text
        finally:
            trace.close()
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


@pytest.mark.parametrize("flags", [[], ["--trace-prompts"]], ids=["without", "with"])
def test_the_prompt_on_a_command_line_is_a_prompt(flags: list[str], tmp_path: Path) -> None:
    words = ["generate", "gpt2-tiny", PROMPT, "--stop", STOP, "--max-tokens", "3", "--kv-cache-memory-bytes", "20M"]
    command = [sys.executable, "-m", "stage03_engine", *words, "--trace", str(tmp_path), *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    [start] = [e for e in read_run(tmp_path).events if e.name == "run.start"]
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
    said = json.dumps([event.args for event in read_run(tmp_path).events])
    assert "http.request" in {e.name for e in read_run(tmp_path).events}
    assert not [word for word in ("giraffe", "okapi", "tapir") if word in said]
