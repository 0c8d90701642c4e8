"""Adapters of a server whose engine is killed and started again, while their files change: it has those that are as they were, and the others are
refused by a line, whichever engine a request gets to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import wait_until
from server_under_test import ServerProcess
from small_adapters import write_adapter
from small_gpt2 import first_layers

from stagetrace import read_run

BODY = {"prompt": "To be, or not to be", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
NAMES = ("same", "changed", "moved", "unloaded", "later", "in its place")
AT_START = NAMES[:4]
KINDS: dict[str, tuple[str, ...]] = {
    "two engines": ("-dp", "2"),
    "two servers": ("-dp", "2", "--api-server-count", "2"),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    model = Path(first_layers(tmp_path / "model", 1))
    for seed, name in enumerate((*NAMES, "other"), start=1):
        write_adapter(tmp_path / name, model, seed=seed, strength=1.0)
    return tmp_path


@pytest.fixture
def server(request: pytest.FixtureRequest, files: Path) -> Iterator[ServerProcess]:
    modules = [f"{name}={files / name}" for name in AT_START]
    own = () if request.param == "two servers" else ("--allow-runtime-lora-updating", "--lora-root", str(files))
    with closing(
        ServerProcess(
            str(files / "model"), "--served-model-name", "base", "--port", "0", "--kv-cache-memory-bytes", "20000000", "--max-model-len", "64",
            "--data-parallel-restart", "2", "--enable-lora", "--max-loras", "2", "--trace", str(files / "trace"), *KINDS[request.param], *own,
            "--lora-modules", *modules,
        )
    ) as server:  # fmt: skip
        server.url = server.wait_until_ready()
        yield server


def engines(server: ServerProcess) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith("stages::EngineCore"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def ask(server: ServerProcess, model: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY | {"model": model}, timeout=120)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def change(server: ServerProcess, path: str, **body: Any) -> None:
    answer = httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
@pytest.mark.parametrize("server", KINDS, indirect=True)
def test_an_engine_that_starts_again_has_the_adapters_that_are_as_they_were(
    server: ServerProcess, files: Path, request: pytest.FixtureRequest
) -> None:
    at_run_time = "two servers" not in request.node.name
    left = ["base", "same"]
    if at_run_time:
        change(server, "load", lora_name="later", lora_path="later")
        change(server, "load", lora_name="in its place", lora_path="other")
        change(server, "load", lora_name="in its place", lora_path="in its place", load_inplace=True)
        change(server, "unload", lora_name="unloaded")
        left += ["later", "in its place"]
    expected = {name: text(ask(server, name)) for name in left}
    assert len(set(expected.values())) == len(left)
    for name in AT_START:
        assert ask(server, name).status_code == (404 if at_run_time and name == "unloaded" else 200)
    shutil.rmtree(files / "changed")
    shutil.copytree(files / "other", files / "changed")
    (files / "moved").rename(files / "elsewhere")
    before = {process.pid for process in engines(server)}
    victim = engines(server)[-1]
    victim.kill()
    wait_until(lambda: {p.pid for p in engines(server)} - before, "no engine is started in its place")
    wait_until(lambda: "no longer those that were loaded" in " ".join(server.lines), "the change is not noticed")
    wait_until(lambda: not httpx.get(f"{server.url}/health").content, "the engines do not come back")
    for _ in range(6):  # with each of the engines, and of the servers
        assert {name: text(ask(server, name)) for name in left} == expected
        for name in ("changed", "moved", *(["unloaded"] if at_run_time else [])):
            refused = ask(server, name)
            assert refused.status_code in (400, 404) and name in refused.json()["error"]["message"], refused.text
            assert "\n" not in refused.json()["error"]["message"]
    assert not any("Traceback" in line for line in server.lines)
    if at_run_time:
        cards = {card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
        assert cards == set(left)
        change(server, "load", lora_name="changed", lora_path="changed")
        assert text(ask(server, "changed")) not in expected.values()
    server.process.terminate()
    assert server.wait() == 0
    refused_names = {
        event.args["adapter"]: event.args["message"] for event in read_run(files / "trace").named("lora.refused")
    }
    assert refused_names.keys() == {"changed", "moved"}
    assert "no longer those" in refused_names["changed"] and "cannot read" in refused_names["moved"]
