"""Clients that others wrote, unchanged, against a real server: a short session with each. A client that is not installed
(the extra `clients` brings them) is skipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--disable-any-whitespace")
    yield server.wait_until_ready() + "/v1"
    server.close()


@pytest.fixture(scope="module")
def greedy(url: str) -> str:
    """What every client must bring back: eight greedy tokens."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    return str(httpx.post(url + "/completions", json=body).json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def greedy_chat(url: str) -> str:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    return str(httpx.post(url + "/chat/completions", json=body).json()["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_langchain(url: str, greedy: str, greedy_chat: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    settings = {"base_url": url, "api_key": "none", "model": "gpt2-tiny", "max_tokens": 8, "temperature": 0}
    completing, chatting = langchain.OpenAI(**settings), langchain.ChatOpenAI(**settings)
    assert completing.invoke(PROMPT) == greedy
    assert completing.batch([PROMPT, PROMPT]) == [greedy, greedy]
    assert "".join(completing.stream(PROMPT)) == greedy
    answer = chatting.invoke(PROMPT)
    assert answer.content == greedy_chat and answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chatting.stream(PROMPT)) == greedy_chat


@pytest.mark.slow
def test_langchain_calls_tools_through_responses(url: str) -> None:
    """A tool is called, its result goes back, and the conversation goes on: with all items, and with the id of the response."""
    langchain = pytest.importorskip("langchain_openai")
    settings = {"base_url": url, "api_key": "none", "model": "gpt2-tiny", "max_tokens": 20, "temperature": 0}
    place = {"type": "string", "enum": ["sun", "moon"]}
    look = {"name": "look", "description": "See.", "parameters": {"type": "object", "properties": {"at": place}, "required": ["at"]}}  # fmt: skip
    said = set()
    for by_id in (False, True):
        model = langchain.ChatOpenAI(**settings, use_responses_api=True, use_previous_response_id=by_id)
        calling = model.bind_tools([look], tool_choice="look", parallel_tool_calls=False)
        talk: list[object] = [("user", "Look!")]
        answer = calling.invoke(talk)
        (call,) = answer.tool_calls
        assert call["name"] == "look" and call["args"]["at"] in ("sun", "moon")
        *chunks, last = calling.stream(talk)
        assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"] and not last.tool_calls
        talk += [answer, {"role": "tool", "content": "bright", "tool_call_id": call["id"]}]
        said |= {model.invoke(talk).text, "".join(chunk.text for chunk in model.stream(talk))}
    assert len(said) == 1 and said.pop().strip()


@pytest.mark.slow
def test_litellm(url: str, greedy: str, greedy_chat: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices when it is imported
    litellm = pytest.importorskip("litellm")
    how = {"api_base": url, "api_key": "none", "max_tokens": 8, "temperature": 0}
    for provider in ("hosted_vllm/", "openai/"):
        chat = {"model": provider + "gpt2-tiny", "messages": [{"role": "user", "content": PROMPT}], **how}
        answer = litellm.completion(**chat)
        assert answer.choices[0].message.content == greedy_chat and answer.usage.completion_tokens == 8
        assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**chat, stream=True)) == greedy_chat
    answer = litellm.text_completion(model="text-completion-openai/gpt2-tiny", prompt=PROMPT, **how)
    assert answer.choices[0].text == greedy
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", messages=[{"role": "user", "content": "x"}], **how)


@pytest.mark.slow
def test_llm(url: str, greedy_chat: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    model = f"- model_id: tiny\n  model_name: gpt2-tiny\n  api_base: {url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model, encoding="utf-8")
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", "-m", "tiny", "-o", "temperature", "0", "-o", "max_tokens", "8"]
    for more in ([], ["--no-stream"]):
        result = subprocess.run(
            [*command, *more, PROMPT], env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.rstrip("\n") == greedy_chat.rstrip("\n")


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        yield client


SAID: dict[str, Any] = {
    "model": "gpt2-tiny", "max_tokens": 8, "messages": [{"role": "user", "content": PROMPT}],
    "extra_body": {"temperature": 0},  # newer versions of the client have no argument for it
}  # fmt: skip


def test_anthropic(claude: anthropic.Anthropic, greedy_chat: str) -> None:
    answer = claude.messages.create(**SAID)
    assert answer.content[0].text == greedy_chat and answer.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="gpt2-tiny", messages=SAID["messages"]).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    with claude.messages.stream(**SAID) as stream:
        assert "".join(stream.text_stream) == greedy_chat
        assert stream.get_final_message().usage.output_tokens == 8
    stopped = claude.messages.create(**SAID, stop_sequences=[greedy_chat[3]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", greedy_chat[3])
    with pytest.raises(anthropic.NotFoundError) as refusal:
        claude.messages.create(**SAID | {"model": "other"})
    assert refusal.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="output_config.format cannot be used as a grammar"):
        form = {"type": "json_schema", "schema": {"type": 7}}
        claude.messages.create(**SAID, output_config={"format": form}, stream=True)  # type: ignore[call-overload]


def test_anthropic_calls_tools(claude: anthropic.Anthropic) -> None:
    """A tool is called, its result goes back, and the conversation goes on; also in a stream."""
    schema = {"properties": {"at": {"enum": ["sun", "moon"]}}, "required": ["at"]}
    tool: Any = {"name": "look", "description": "See.", "input_schema": schema}
    for choice in ({"type": "tool", "name": "look"}, {"type": "any", "disable_parallel_tool_use": True}):
        more: Any = {"max_tokens": 60, "tools": [tool], "tool_choice": choice}
        answer = claude.messages.create(**SAID | more)
        with claude.messages.stream(**SAID | more) as stream:
            streamed = stream.get_final_message()
        for message in (answer, streamed):
            [call] = message.content
            assert message.stop_reason == "tool_use" and call.name == "look" and call.input["at"] in ("sun", "moon")
        assert answer.content[0].input == streamed.content[0].input
        result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "It is bright."}
        talk: Any = [
            *SAID["messages"],
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        last = claude.messages.create(**SAID | {"messages": talk, "tools": [tool], "tool_choice": {"type": "none"}})
        assert last.content[0].type == "text"


def test_anthropic_leaves_a_stream(claude: anthropic.Anthropic, url: str) -> None:
    """Its request ends in the engine too."""

    def aborted() -> float:
        metrics = httpx.get(url.removesuffix("/v1") + "/metrics").text
        line = next(line for line in metrics.splitlines() if re.match(r'vllm:request_success_total.*"abort"', line))
        return float(line.split()[-1])

    before = aborted()
    with claude.messages.stream(**SAID | {"max_tokens": 400}) as stream:
        next(iter(stream.text_stream))
    wait_until(lambda: aborted() == before + 1, "the engine goes on")


NODE_SESSION = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "gpt2-tiny", prompt = process.argv[3], messages = [{ role: "user", content: prompt }];
const sampling = { model, max_tokens: 8, temperature: 0 };
const said = {};
said.models = (await client.models.list()).data.map((one) => one.id);
said.completion = (await client.completions.create({ ...sampling, prompt })).choices[0].text;
said.chat = (await client.chat.completions.create({ ...sampling, messages })).choices[0].message.content;
said.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...sampling, messages, stream: true })) {
  said.streamed += chunk.choices[0]?.delta?.content ?? "";
}
try {
  await client.completions.create({ ...sampling, prompt, model: "other" });
} catch (error) {
  said.refused = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify(said));
"""


def test_node(url: str, greedy: str, greedy_chat: str, tmp_path: Path) -> None:
    """OpenAI's own client for Node, fresh from npm where that can be reached."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("no npm on this machine")
    install = [
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--fetch-retries=0",
        "openai",
    ]
    try:
        subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE)
    except subprocess.SubprocessError:
        pytest.skip("npm's registry is not to be reached")
    script = tmp_path / "session.mjs"
    script.write_text(NODE_SESSION, encoding="utf-8")
    result = subprocess.run(
        ["node", str(script), url, PROMPT], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "models": ["gpt2-tiny"], "completion": greedy, "chat": greedy_chat, "streamed": greedy_chat,
        "refused": ["NotFoundError", 404, "model"],
    }  # fmt: skip
