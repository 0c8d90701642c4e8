"""Clients that others wrote, unchanged, against a real server: a short session with each. A client that is not installed
(the extra `clients` brings them) is skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
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
