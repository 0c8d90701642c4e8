"""The whole system as a user meets it: `serve gpt2-tiny` in its processes, real clients, signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

FLAGS = ("gpt2-tiny", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "200000000")
MODEL = "gpt2-tiny"


def engine_of(server: ServerProcess) -> psutil.Process:
    [engine] = [
        p
        for p in psutil.Process(server.process.pid).children()
        if " ".join(p.cmdline()).startswith("stages::EngineCore")
    ]
    return engine


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(*FLAGS, "--server-dev-mode", "--enable-prompt-tokens-details")  # for /reset_prefix_cache
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def make(*flags: str) -> ServerProcess:
        servers.append(ServerProcess(*FLAGS, *flags))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_models_completion_usage(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.completions.create(model=MODEL, prompt="To be, or", max_tokens=12, temperature=0)
    assert answer.choices[0].text.startswith(" I'll be so,") and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 12, 16)


def test_openai_client_streaming_is_the_same_text(client: openai.OpenAI) -> None:
    settings = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 40, "temperature": 0.8, "seed": 3}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len(chunks) > 10


def test_openai_client_chat_is_the_concatenation_of_its_messages(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "ROMEO:"}, {"role": "user", "content": " What"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10, temperature=0, logprobs=True)
    text = client.completions.create(model=MODEL, prompt="ROMEO: What", max_tokens=10, temperature=0)
    assert chat.choices[0].message.content == text.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].logprobs is not None and len(chat.choices[0].logprobs.content or []) == 10
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == text.choices[0].text


def test_openai_client_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.completions.create(model=MODEL, prompt="word " * 600)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)


@pytest.mark.slow
def test_64_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    """Every fourth is asked alone too."""
    prompts = [
        f"{name}: {word}"
        for name in ("ROMEO", "JULIET", "KING", "All")
        for word in ["what", "is", "the", "news", "my", "good", "lord", "of", "late", "and", "so", "we", "go"]
    ]
    prompts = [*dict.fromkeys(prompts), *(f"line {i}" for i in range(64))][:64]

    def ask(prompt: str) -> str:
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0).choices[0].text

    alone = [ask(prompt) for prompt in prompts[::4]]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, prompts))
    assert together[::4] == alone
    assert len(set(together)) > 32


def test_prefix_caching_shows_in_the_usage_and_salts_keep_tenants_apart(server: ServerProcess) -> None:
    def cached(**extra: object) -> int:
        body = {
            "prompt": "KING RICHARD: what a piece of work is a man, " * 3,
            "max_tokens": 2,
            "temperature": 0,
            **extra,
        }
        usage = httpx.post(server.url + "/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 < cached()
    assert cached(cache_salt="a") == 0 < cached(cache_salt="a")
    assert cached(cache_salt="b") == 0
    assert httpx.post(server.url + "/reset_prefix_cache").status_code == 200
    assert cached() == 0
    metrics = httpx.get(server.url + "/metrics").text
    assert "vllm:prefix_cache_hits_total" in metrics and "vllm:prefix_cache_queries_total" in metrics


def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess) -> None:
    body = {"prompt": "ROMEO:", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
    metrics = ""

    def is_idle() -> bool:
        nonlocal metrics
        metrics = httpx.get(server.url + "/metrics").text
        gauges = ("vllm:num_requests_running{", "vllm:kv_cache_usage_perc{")
        shown = [line for line in metrics.splitlines() if line.startswith(gauges)]
        return bool(shown) and all(line.endswith(" 0.0") for line in shown)

    wait_until(is_idle, "the abandoned request still runs")
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="gpt2-tiny"} 1.0' in metrics


def test_the_api_process_is_small_and_without_torch(server: ServerProcess) -> None:
    process = psutil.Process(server.process.pid)
    assert process.memory_info().rss < 150e6
    maps = Path(f"/proc/{process.pid}/maps")
    if maps.exists():
        assert "libtorch" not in maps.read_text()


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish(start: Callable[..., ServerProcess]) -> None:
    server = start()
    engine = engine_of(server)
    body = {"prompt": "ROMEO:", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.process.pid, signal.SIGTERM)
        rest = list(lines)
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(rest)
    assert server.wait() == 0
    assert not engine.is_running()


@pytest.mark.slow(keep=("args0", "args2"))
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["gpt2"], ["gpt2-tiny", "--load-format dummy"]),
        (["no/such-model"], ["gpt2-tiny"]),
        (["gpt2-tiny", "--max-num-seq", "3"], ["--max-num-seqs"]),
        (["gpt2-tiny", "--max-model-len", "513"], ["512"]),
        (["gpt2-tiny", "--config", "/no/such/file.yaml"], ["/no/such/file.yaml"]),
        (["gpt2-tiny", "--trace", "/proc/no"], ["/proc/no"]),
    ],
)
def test_what_cannot_be_served_ends_in_one_line(args: list[str], words: list[str], tmp_path: Path) -> None:
    import subprocess

    environment = os.environ | {"HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "stage02_server", "serve", *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
    )
    assert result.returncode == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("stages: error: ") and all(word in line for word in words)


def test_gpt2_with_random_weights_needs_no_network() -> None:
    """The real gpt2 shape, without a file: the first tokens arrive through every stage."""
    server = ServerProcess(
        "gpt2", "--load-format", "dummy", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "100000000"
    )
    try:
        server.wait_until_ready()
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "Hello", "max_tokens": 3}).json()
        assert answer["usage"]["completion_tokens"] == 3 and answer["model"] == "gpt2"
    finally:
        server.close()
