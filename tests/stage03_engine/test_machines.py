"""One engine over two machines, which are two processes here: the same tokens, and one clear line for whatever goes wrong.

`-m long` has two machines with a cable between them: network namespaces, where the system allows them.
"""

from __future__ import annotations

import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed.machines.addresses import (
    SECRET_FILE,
    SECRET_REQUIRED,
    environment_with_secret,
)
from stage03_engine.core.features.distributed.machines.head import Nodes
from stage03_engine.core.features.distributed.machines.messages import JoinEngine, StartWorkers, decode_order
from stage03_engine.errors import ConfigError, EngineDeadError, StagesError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.nodes.manifest import NodeConfig
from stage03_engine.nodes.messages import CONTROL, Ping, Refusal, Welcome, encode
from stage03_engine.nodes.sameness import differences, facts_of
from stage03_engine.nodes.secure_sockets import Connection
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

SECRET = "a secret of these tests"
SETTINGS: dict[str, Any] = {
    "max_model_len": 96, "block_size": 4, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 24, "max_num_seqs": 8,
}  # fmt: skip
TWO: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, in chunks."""
    rng = random.Random(15)
    stem = [rng.randrange(1, 2048) for _ in range(30)]
    prompts = [stem[: rng.randrange(31)] + [rng.randrange(1, 2048) for _ in range(8)] for _ in range(12)]
    return prompts, [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)] * len(prompts)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(*workload())]


def two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return int(port)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET)


@pytest.fixture
def port() -> int:
    return two_free_ports()


@contextmanager
def machine(port: int, *flags: str, model: str = "gpt2-tiny", rank: int = 1) -> Iterator[ServerProcess]:
    """Machine 1 of two."""
    place = ("--nnodes", "2", "--node-rank", str(rank), "--master-port", str(port))
    process = ServerProcess(model, "--headless", *place, *flags)
    try:
        yield process
    finally:
        children = psutil.Process(process.process.pid).children() if process.process.poll() is None else []
        process.close()
        psutil.wait_procs(children, timeout=PATIENCE)


def error_of(process: ServerProcess, code: int = 2) -> str:
    """The one line with which a machine ended: 2 for what it was started with, 1 for what happened to it."""
    assert process.wait() == code, process.lines
    errors = [line for line in process.lines if line.startswith("stages: error:")]
    assert len(errors) == 1 and not any("Traceback" in line for line in process.lines), process.lines
    return errors[0]


def worker_of(process: ServerProcess) -> psutil.Process:
    [worker] = psutil.Process(process.process.pid).children()
    return worker


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("gpt2-tiny", **SETTINGS) as llm:
        return tokens(llm)


@pytest.mark.slow(keep="tensor")
@pytest.mark.parametrize("form", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_machines_give_the_tokens_of_one(form: str, expected: list[list[int]], port: int, tmp_path: Path) -> None:
    settings = {**SETTINGS, form: 2, "nnodes": 2, "master_port": port, "trace": str(tmp_path)}
    with machine(port) as other:
        with LLM("gpt2-tiny", **settings) as llm:
            assert tokens(llm) == expected
            worker = worker_of(other)
        assert other.wait() == 0, other.lines
        assert other.process.stdout is not None and "torch" not in other.process.stdout.read().split()
    assert is_gone(worker)
    if form == "tensor_parallel_size":
        check_recording(tmp_path)


def check_recording(folder: Path) -> None:
    run = read_run(folder)
    assert {event.proc for event in run.events} == {"LLM", "Worker_TP0", "Worker_TP1"}
    assert len(run.run_ids) == 1
    sent = {event.ref for event in run.named("executor.step_sent")}
    assert {event.cause for event in run.named("worker.step_received")} == sent


# What a machine is refused for


@pytest.mark.slow
def test_machines_that_do_not_fit_are_refused_and_the_right_one_is_welcome(
    expected: list[list[int]], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_model = tmp_path / "model"
    shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", other_model, copy_function=shutil.copy)
    with (other_model / "model.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\0" * 8)
    found: list[list[list[int]]] = []
    asked = threading.Event()

    def engine() -> None:
        with LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port) as llm:
            found.append(tokens(llm))
            asked.wait(PATIENCE)

    head = threading.Thread(target=engine)
    head.start()
    with machine(port, model=str(other_model)) as other:
        assert "refuses this node: weights is model.safetensors" in error_of(other)
    with machine(port, "--load-format", "dummy") as other:
        assert "refuses this node: load_format is safetensors on the head and dummy on the node" in error_of(other)
    with machine(port, "--nnodes", "3") as other:
        assert "refuses this node: nnodes is 2 on the head and 3 on the node" in error_of(other)
    monkeypatch.setenv("STAGES_NODE_SECRET", "another secret of these tests")
    with machine(port) as other:
        assert "refuses this node: the secrets differ, or only one side has one" in error_of(other, 1)
    with machine(port, "--no-node-secret-required") as other:
        assert "refuses this node: the secrets differ, or only one side has one" in error_of(other, 1)
    monkeypatch.setenv("STAGES_NODE_SECRET", SECRET)
    with machine(port) as right:
        right.wait_for("Running Worker_TP1 for 127")
        with machine(port) as second:
            assert "refuses this node: node_rank 1 is taken by node " in error_of(second)
        asked.set()
        head.join(PATIENCE)
        assert found == [expected] and right.wait() == 0, right.lines


def test_what_differs_is_named() -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny")
    here = facts_of(config)
    assert differences(here, facts_of(config)) == ""
    there = here | {"torch's version": "1.0"}
    own = here["torch's version"]
    assert differences(here, there) == f"torch's version is {own} on the head and 1.0 on the node"
    smaller = replace(config, model_config=replace(config.model_config, shape=replace(config.shape, num_layers=5)))
    assert differences(here, facts_of(smaller)) == "the model's num_layers is 6 on the head and 5 on the node"
    many = differences(here, {})
    assert many.startswith(f"version is {here['version']} on the head and unknown on the node, ")
    assert many.count(" on the head ") == 3 and many.endswith(f" (and {len(here) - 3} more)")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"node_rank": 1}, "node_rank 1 must be less than nnodes, which is 1"),
    ({**TWO, "node_rank": 2}, "node_rank 2 must be less than nnodes, which is 2"),
    ({"nnodes": 2}, "nnodes = 2 must divide tensor_parallel_size x pipeline_parallel_size, which is 1"),
    ({**TWO, "nnodes": 3}, "nnodes = 3 must divide tensor_parallel_size x pipeline_parallel_size, which is 2"),
    ({**TWO, "distributed_executor_backend": "ray"}, "works with distributed_executor_backend mp alone, not with ray"),
    ({**TWO, "data_parallel_size": 2}, "nnodes = 2 is one engine on several machines, and data_parallel_size several"),
    ({**TWO, "master_addr": "0.0.0.0"}, "needs the address of machine 0 in master_addr"),
    ({**TWO, "master_port": 65535}, "needs two ports, master_port and the next one; 65535 is too high"),
    ({**TWO, "nnodes": 0}, "nnodes must be at least 1, not 0"),
    ({**TWO, "node_rank": 1}, "node_rank 1 has no engine of its own: start it with `stages serve MODEL --headless`"),
    ({**TWO, "master_addr": "no.such.machine.invalid"}, "master_addr 'no.such.machine.invalid' is not an address"),
    ({**TWO, "master_addr": "192.0.2.1"}, "Cannot assign requested address"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[message for _, message in WRONG])
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StagesError, match=message.replace("(", r"\(")):
        LLM("gpt2-tiny", **SETTINGS, **settings)


def test_a_port_that_is_taken(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=rf"port {port} \(--master-port\)"):
        LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port)
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(StagesError, match=f"127.0.0.1:{port + 1} is taken"),
    ):
        LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port)


def test_without_a_secret(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGES_NODE_SECRET")
    with pytest.raises(ConfigError, match="machines that speak with each other need a shared secret"):
        LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port)


def test_a_worker_finds_the_file_with_the_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("~/secret", str(tmp_path / "secret")):
        found = environment_with_secret({}, NodeConfig(given))
        assert found == {SECRET_FILE: str(tmp_path / "secret"), SECRET_REQUIRED: "true"}


def head_of(
    port: int, welcome: Callable[[JoinEngine], StartWorkers], fail: Callable[[str], object]
) -> tuple[Nodes, JoinEngine]:
    """Machine 0, which listens; and what machine 1 says to it."""
    settings = {**SETTINGS, **TWO, "master_port": port, "node_secret_required": False}
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **settings)
    nodes = Nodes(config, welcome, lambda lane, code: None, fail)
    nodes.start()
    facts = facts_of(config)
    return nodes, JoinEngine("1", [1], facts, 0, nnodes=2, model_path=None, tokenizer_path=None, num_threads=None)


def test_who_does_not_fit_is_refused_and_who_fits_is_welcome(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the head answers. (Machines that say it: above.)"""
    nodes, join = head_of(port, lambda join: StartWorkers({1: "lane"}, "place"), pytest.fail)
    said: list[Any] = []
    monkeypatch.setattr(nodes, "send_frames", lambda peer, frames: said.append(decode_order(frames[1])) or True)
    try:
        for changed, why in (
            ({"facts": join.facts | {"weights": "others"}}, r"weights is model\.safetensors.* and others on the node"),
            ({"nnodes": 3}, "nnodes is 2 on the head and 3 on the node"),
            ({"numbers": [2]}, "node_rank 2 is not that of another machine"),
        ):
            nodes._obey(b"odd", msgspec.structs.replace(join, **changed))
            [refusal], said[:] = said, []
            assert isinstance(refusal, Refusal) and re.search(why, refusal.message) and not nodes.nodes
        nodes._obey(b"right", join)
        nodes._obey(b"second", join)
        assert [type(order) for order in said] == [Welcome, StartWorkers, Ping, Refusal]
        assert said[-1].message == "node_rank 1 is taken by node 1"
    finally:
        nodes.close("the test is over")


def test_a_thread_that_fails_ends_the_engine(port: int) -> None:
    """A bug while the head listens must not leave the engine waiting for machines that nobody hears."""

    def welcome(join: JoinEngine) -> StartWorkers:
        raise ZeroDivisionError(join.name)

    reasons: queue.Queue[str] = queue.Queue()
    nodes, join = head_of(port, welcome, reasons.put)
    context = zmq.Context()
    connection = Connection(context, zmq.DEALER, nodes.address, None, b"node1")
    try:
        connection.send(CONTROL, encode(join))
        assert "ZeroDivisionError" in reasons.get(timeout=PATIENCE)
    finally:
        connection.close()
        context.destroy(linger=0)
        nodes.close("the test is over")


def test_the_machine_with_the_engine_is_not_headless(port: int) -> None:
    with machine(port, "-tp", "2", rank=0) as other:
        assert "node_rank 0 is the machine with the engine and the API server" in error_of(other)


# Who does not come, and who goes


def test_a_machine_that_never_comes(port: int) -> None:
    said = r"Worker_TP1 \(rank .*1, on machine .*1\) did not come within 1 s \(--distributed-timeout-seconds\)$"
    with pytest.raises(StagesError, match=said):
        LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port, distributed_timeout_seconds=1)


def test_a_head_whose_name_nobody_knows_yet_is_asked_for_again(port: int) -> None:
    flags = ("--master-addr", "no.such.machine.invalid", "--distributed-timeout-seconds", "1")
    with machine(port, *flags) as other:
        assert "master_addr 'no.such.machine.invalid' is not an address" in error_of(other)
        assert any("asking again for 1 s" in line for line in other.lines)


def test_a_head_that_never_comes(port: int) -> None:
    with machine(port, "--distributed-timeout-seconds", "1") as other:
        assert error_of(other, 1).endswith(
            f"no head answered at 127.0.0.1:{port + 1} within 1 s (--master-addr, --master-port)"
        )


def end_of(llm: LLM) -> str:
    """Why an engine that is at work ended."""
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(["O"] * 8, SamplingParams(max_tokens=90, ignore_eos=True))
        while True:
            llm.generate(["O"], SamplingParams(max_tokens=2))
    return str(caught.value)


def test_a_worker_that_is_killed_elsewhere_ends_the_engine_with_its_name(port: int) -> None:
    with machine(port) as other, LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port) as llm:
        tokens(llm)
        worker_of(other).kill()
        assert end_of(llm).startswith("Worker_TP1 ended unexpectedly with exit code -9 (killed")
        llm.shutdown()
        assert f"the head at 127.0.0.1:{port + 1} ended: Worker_TP1 ended unexpectedly" in error_of(other, 1)


@pytest.mark.slow(keep="9")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_machine_that_ends_ends_the_engine(how: signal.Signals, port: int) -> None:
    with machine(port) as other, LLM("gpt2-tiny", **SETTINGS, **TWO, master_port=port) as llm:
        tokens(llm)
        worker = worker_of(other)
        other.process.send_signal(how)
        why = "it was killed, or the network to it is cut" if how == signal.SIGKILL else "it was told to end"
        assert end_of(llm) == f"machine 1 is lost: {why}"
        wait_until(lambda: is_gone(worker), "its worker stays")
        assert other.wait() == (-9 if how == signal.SIGKILL else 0)


def test_a_head_that_is_killed_leaves_nothing_behind(port: int) -> None:
    words = ["generate", "gpt2-tiny", "O", "--max-tokens", "80", "--trace-console", "--nnodes", "2", "-tp", "2"]
    command = [sys.executable, "-m", "stage03_engine", *words, "--master-port", str(port)]
    with machine(port) as other:
        head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert head.stderr is not None
            assert any("engine.step" in line for line in head.stderr)
            workers = [worker_of(other), *psutil.Process(head.pid).children()]
        finally:
            head.kill()
            head.communicate()
        assert f"the head at 127.0.0.1:{port + 1} is lost" in error_of(other, 1)
        wait_until(lambda: all(map(is_gone, workers)), "a worker stays")
