"""Two machines, as network namespaces with a cable between them: a head and a headless node, and what happens when the cable is cut.

Needs root and `ip netns`, and takes half a minute: only with `-m long`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stagetrace import read_run
from stagetrace.check.invariants import check

HEAD, NODE = "10.199.77.1", "10.199.77.2"
FLAGS = ("gpt2-tiny", "-dp=2", "-dpl=1", f"-dpa={HEAD}", "-dpp=13345", "--kv-cache-memory-bytes=20000000")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two namespaces; their ends of the cable are called `cable`."""
    names = (f"stages-head-{os.getpid()}", f"stages-node-{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HEAD, NODE)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Machine(ServerProcess):
    """A server in a namespace."""

    def __init__(self, namespace: str, folder: Path, *flags: str) -> None:
        secret = folder / "secret"
        secret.write_text("0123456789abcdef")
        self.traces = folder / namespace
        own = [f"--node-secret-file={secret}", f"--trace={self.traces}", *flags]
        super().__init__(*FLAGS, *own, before=("ip", "netns", "exec", namespace))

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "To be, or", "max_tokens": 20, "temperature": 0} | more)


def tokens_of(client: httpx.Client) -> list[float]:
    lines = client.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")]


@pytest.mark.long
def test_two_machines_with_a_cable_that_is_cut(machines: tuple[str, str], tmp_path: Path) -> None:
    here, there = machines
    uds = tmp_path / "http"
    with (
        closing(Machine(here, tmp_path, f"--uds={uds}")) as head,
        closing(Machine(there, tmp_path, "--headless", "-dpr=1")) as node,
    ):
        head.wait_for("Ready after .* Serving")
        with (
            httpx.Client(
                transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://head", timeout=PATIENCE
            ) as client,
            ThreadPoolExecutor(8) as threads,
        ):
            answers = list(threads.map(lambda _: ask(client), range(8)))
            texts = {answer.json()["choices"][0]["text"] for answer in answers}
            assert len(texts) == 1 and min(tokens_of(client)) > 0

            engines = node.children
            assert len(engines) == 1
            long = [threads.submit(ask, client, max_tokens=450, ignore_eos=True) for _ in range(4)]
            ip("-n", there, "link", "set", "cable", "down")
            assert len({answer.result().json()["choices"][0]["text"] for answer in long}) == 1
            assert node.wait() == 1 and "is lost: it has died, or the network to it is cut" in node.lines[-1]
            head.wait_for(r"Node .* is lost: its connection is gone")
            wait_until(lambda: not any(each.is_running() for each in engines), "the engines outlive their node")
            assert client.get("/health").headers["x-server-state"] == "degraded" and ask(client).status_code == 200

            ip("-n", there, "link", "set", "cable", "up")
            with closing(Machine(there, tmp_path, "--headless", "-dpr=1")) as again:
                head.wait_for("Engine 1 is ready again")
                list(threads.map(lambda _: ask(client), range(4)))
                head.process.terminate()
                assert head.wait() == 0 and again.wait() == 0
    both = tmp_path / "both"
    for namespace in machines:
        shutil.copytree(tmp_path / namespace, both, dirs_exist_ok=True)
    report = check(both)
    lost = "was sent to the engine and not received"  # what was on its way when the cable was cut
    assert all(lost in finding.text for finding in report.findings), report.findings
    run = read_run(both)
    assert len(run.run_ids) == 1
    places = {event.ref: place for place, event in enumerate(run.events)}
    linked = [(places[e.cause], place) for place, e in enumerate(run.events) if e.cause in places]
    assert linked and all(cause < place for cause, place in linked)
    lanes = {event.proc for event in run.named("zmq.request_received")}
    assert lanes == {"EngineCore_DP0", "EngineCore_DP1"}
