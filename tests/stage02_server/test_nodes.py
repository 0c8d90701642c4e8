"""Engines on several machines: heads and headless nodes as processes that meet on 127.0.0.1, with echoes for engines."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq
from echo_engine_process import PATCH
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess, events

from stage02_server.__main__ import main
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.frontend.core_client import bind_sockets
from stage03_engine.frontend.features.data_parallel.nodes.head import NodeHub
from stage03_engine.frontend.features.data_parallel.nodes.messages import (
    EQUAL,
    EngineGone,
    EngineUp,
    StartEngine,
    decode_order,
    launch_frame,
)
from stage03_engine.messages import ENGINE_CORE_DEAD, EngineReady
from stage03_engine.nodes import hub
from stage03_engine.nodes.messages import CONTROL, Bye, Join, encode
from stage03_engine.nodes.sameness import facts_of
from stage03_engine.nodes.secure_sockets import Connection, NodeSecret
from stagetrace import read_run

PROMPT = "To be, or not to be, that is the question"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["-dp=2", "-dpr=1", "-dpa=127.0.0.1"],
            "data_parallel_start_rank 1 is for a machine without an API server (--headless), or with --data-parallel-hybrid-lb; the head "
            "begins with 0",
        ),
        (
            ["-dp=2", "-dpl=1", "-dpa=127.0.0.1"],
            "machines that speak with each other need a shared secret: make one with ",
        ),
        (
            ["-dp=2", "-dpl=1", "-dpa=127.0.0.1", "-asc=2"],
            "engines on other machines need api_server_count 1, not 2: they work for one API server",
        ),
        (
            ["-dp=3", "-dpl=2", "-dpr=1", "-dph", "-asc=2"],
            "data_parallel_hybrid_lb needs api_server_count 1, not 2: your load balancer divides the requests between servers",
        ),
        (
            ["-dp=2", "-dpl=1", "-dpa=127.0.0.1", "-dpp={taken}", "--no-node-secret-required"],
            "127.0.0.1:{taken} is taken; choose another port (--data-parallel-address, --data-parallel-rpc-port)",
        ),
        (
            ["-dp=2", "-dpl=1", "-dpa=192.0.2.1", "--no-node-secret-required"],
            "this machine has no address 192.0.2.1:29550 (--data-parallel-address, --data-parallel-rpc-port)",
        ),
        (
            [
                "-dp=3",
                "-dpl=0",
                "-dpa=127.0.0.1",
                "-dpp={free}",
                "--no-node-secret-required",
                "--distributed-timeout-seconds=1",
            ],
            "no machine came for engines 0, 1, 2 within 1 s; start one with --headless --data-parallel-size 3 --data-parallel-start-rank 0 "
            "--data-parallel-address 127.0.0.1 --data-parallel-rpc-port {free}",
        ),
    ],
)
def test_a_head_that_cannot_start_says_why(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ports = {"taken": sock.getsockname()[1], "free": free_port()}
        flags = [flag.format(**ports) for flag in flags]
        assert main(["serve", "gpt2-tiny", "--host=127.0.0.1", "--port=0", *flags]) in (1, 2)
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(f"stages: error: {message.format(**ports)}") and "Traceback" not in said


class Service:
    """A head with one engine of `size`, and its nodes with one each."""

    def __init__(self, folder: Path, size: int = 2, *flags: str) -> None:
        self.port, self.secret = free_port(), folder / "secret"
        self.secret.write_text("0123456789abcdef\n")
        self._flags = [
            "gpt2-tiny", f"-dp={size}", "-dpl=1", "-dpa=127.0.0.1", f"-dpp={self.port}", "--log-level=INFO", *flags,
        ]  # fmt: skip
        self.traces = folder / "traces"
        self.processes: list[ServerProcess] = []
        self.head = self._start("--host=127.0.0.1", "--port=0", f"--trace={self.traces}")

    def _start(self, *flags: str, secret: Path | None = None) -> ServerProcess:
        own = [f"--node-secret-file={secret or self.secret}"]
        self.processes.append(ServerProcess(*self._flags, *own, *flags, patch=PATCH))
        return self.processes[-1]

    def node(self, rank: int = 1, *flags: str, secret: Path | None = None) -> ServerProcess:
        return self._start("--headless", f"-dpr={rank}", f"--trace={self.traces}", *flags, secret=secret)

    def wait_until_ready(self) -> None:
        self.client = httpx.Client(base_url=self.head.wait_until_ready(), timeout=PATIENCE, trust_env=False)

    def ask(self, **more: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        return self.client.post("/v1/completions", json=body | more)

    def states(self) -> dict[str, str]:
        answer = self.client.get("/health")
        return answer.json()["engines"] if answer.content else {}

    def metrics(self, name: str) -> dict[str, float]:
        lines = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(name)]
        return {line.partition('engine="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}

    def close(self) -> None:
        for process in self.processes:
            process.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with closing(Service(tmp_path_factory.mktemp("nodes"))) as service:
        service.pair = service.node()  # type: ignore[attr-defined]
        service.wait_until_ready()
        yield service


def test_each_machine_answers(service: Service) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: service.ask(max_tokens=30), range(8)))
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {answers[0].json()["choices"][0]["text"]}
    tokens = service.metrics("vllm:generation_tokens_total")
    assert tokens.keys() == {"0", "1"} and min(tokens.values()) > 0 and sum(tokens.values()) == 240


def test_it_says_where_it_listens_and_who_has_joined(service: Service) -> None:
    log = "\n".join(service.head.lines)
    assert f"Listening on 127.0.0.1:{service.port} for the machines with engine 1." in log
    assert "has joined, with engine 1." in log and "unprotected" not in log


def refused(service: Service, node: ServerProcess) -> tuple[int, str]:
    """Exit code and last line of a node that cannot join. The service goes on."""
    code = node.wait()
    assert service.states() == {} and service.ask().status_code == 200
    assert not [line for line in node.lines if "Traceback" in line]
    return code, node.lines[-1]


@pytest.mark.slow
def test_another_secret_is_refused_on_both_sides(service: Service, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("fedcba9876543210")
    code, line = refused(service, service.node(secret=tmp_path / "other"))
    assert code == 1 and line == (
        f"stages: error: the head at 127.0.0.1:{service.port} refuses this node: the secrets differ, or only one side has one "
        "(--node-secret-file, STAGES_NODE_SECRET)"
    )
    service.head.wait_for(
        rf"Refused a connection at 127.0.0.1:{service.port}: a node without the secret of this service"
    )


@pytest.mark.parametrize(
    "rank, flags, why",
    [
        (1, ["--block-size=8"], "block_size is 16 on the head and 8 on the node; both sides must have the same"),
        (
            1,
            ["--dtype=bfloat16"],
            "dtype is float32 on the head and bfloat16 on the node; both sides must have the same",
        ),
        (1, [], r"engine 1 is taken by node \S+ \(pid \d+\); see --data-parallel-start-rank"),
        (0, [], "engine 0 is not for another machine: of 2 engines the head has 0 to 0"),
    ],
)
def test_who_does_not_fit_is_refused_on_both_sides(service: Service, rank: int, flags: list[str], why: str) -> None:
    node = service.node(rank, *flags)
    node.wait_for(f"stages: error: the head at 127.0.0.1:{service.port} refuses this node: {why}$")
    service.head.wait_for(f"cannot join: {why}$")
    assert refused(service, node)[0] == 2


def test_who_has_the_secret_but_speaks_nonsense_harms_nobody(service: Service) -> None:
    context = zmq.Context()
    connection = Connection(context, zmq.DEALER, f"tcp://127.0.0.1:{service.port}", NodeSecret(b"0123456789abcdef"))
    for frames in (
        [b""], [b"", b"\xc1"], [b"x"], [b"", b"\x82\xa4type\xa3Bye\xa1z" + b"\x91" * 100_000], [b"", encode(EngineGone(1, 1, 0))], [b"", encode(Bye())],
        *([launch_frame(1, launch), b"\xc1"] for launch in range(9)), *([launch_frame(1, n), ENGINE_CORE_DEAD, b"!"] for n in range(9)),
        [b"", encode(Join("liar", [1], {}, 0))],
    ):  # fmt: skip
        connection.socket.send_multipart(frames)
    service.head.wait_for(
        "Node liar cannot join: version is .* on the head and unknown on the node, torch's version is "
    )
    first, answer = connection.socket.recv_multipart()
    assert first == b"" and b"unknown on the node" in answer
    assert service.states() == {} and service.ask().status_code == 200
    connection.close()
    context.term()


def engines_of(node: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(node.process.pid).children()


def test_an_engine_that_dies_on_the_node_starts_again(service: Service) -> None:
    [engine] = engines_of(service.pair)  # type: ignore[attr-defined]
    engine.kill()
    service.head.wait_for(r"Engine 1: The engine process ended unexpectedly \(exit code -9\)\.")
    service.head.wait_for("Engine 1 is ready again")
    assert service.states() == {} and service.metrics("stages:engine_restarts_total") == {"": 1.0}
    assert engines_of(service.pair) != [engine]  # type: ignore[attr-defined]


@pytest.mark.slow(keep="9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_vanishes_takes_nothing_along_and_may_come_back(service: Service, number: signal.Signals) -> None:
    pair: ServerProcess = service.pair  # type: ignore[attr-defined]
    engines, restarts = engines_of(pair), service.metrics("stages:engine_restarts_total")
    with ThreadPoolExecutor(8) as threads:
        whole = [threads.submit(service.ask, max_tokens=400) for _ in range(6)]
        wait_until(lambda: service.metrics("vllm:num_requests_running").get("1"), "nothing runs on the node")
        pair.process.send_signal(number)
        texts = {answer.result().json()["choices"][0]["text"] for answer in whole}
    assert len(texts) == 1 and pair.wait() == (0 if number == signal.SIGTERM else -9)
    wait_until(lambda: not any(each.is_running() for each in engines), "the engines outlive their node")
    service.head.wait_for(r"Node \S+ \(pid \d+\) is lost: ")
    wait_until(lambda: service.states() == {"0": "ready", "1": "loading"}, "nobody misses the node")
    assert service.ask().status_code == 200
    service.pair = service.node()  # type: ignore[attr-defined]
    service.head.wait_for("Engine 1 is ready again")
    assert service.states() == {} and service.metrics("stages:engine_restarts_total") == restarts


@pytest.mark.slow
def test_a_stream_of_a_lost_node_goes_on_elsewhere(service: Service) -> None:
    pair: ServerProcess = service.pair  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        streams = [threads.submit(service.ask, max_tokens=400, stream=True) for _ in range(2)]
        wait_until(lambda: service.metrics("vllm:num_requests_running") == {"0": 1.0, "1": 1.0}, "both do not run")
        pair.process.kill()
        told = [events(stream.result().text) for stream in streams]
    assert pair.wait() == -signal.SIGKILL
    texts = ["".join(event["choices"][0]["text"] for event in each) for each in told]
    assert texts[0] == texts[1] and texts[0].startswith(PROMPT)  # the echo's
    service.pair = service.node()  # type: ignore[attr-defined]
    service.head.wait_for("Engine 1 is ready again")


def test_the_head_ends_and_so_does_the_node(service: Service) -> None:
    """The last test of this service: afterwards its traces are whole."""
    pair: ServerProcess = service.pair  # type: ignore[attr-defined]
    engines = [*engines_of(pair), *engines_of(service.head)]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(service.ask, max_tokens=200)
        wait_until(lambda: sum(service.metrics("vllm:num_requests_running").values()), "nothing runs")
        service.head.process.terminate()
        assert running.result().status_code == 200
    assert service.head.wait() == 0 and pair.wait() == 0
    assert any("The head ends, and so does this node." in line for line in pair.lines)
    assert not any(each.is_running() for each in engines)
    run = read_run(service.traces)
    assert len(run.run_ids) == 1 and {"Node_1", "APIServer", "EngineCore_DP0", "EngineCore_DP1"} <= {
        e.proc for e in run.events
    }
    joined = run.named("node.joined")
    assert joined[0].cause is not None and abs(joined[0].args["clock_offset_ns"]) < 60_000_000_000
    assert [e.name for e in run.events if e.name.startswith("node.")][:4] == [
        "node.listening", "node.join_sent", "node.joined", "node.welcomed",
    ]  # fmt: skip
    sent = {e.ref for e in run.named("zmq.request_sent")}
    received = [e for e in run.named("zmq.request_received") if e.proc == "EngineCore_DP1"]
    assert received and {e.cause for e in received} <= sent


@pytest.mark.slow
def test_a_head_that_is_killed_takes_its_nodes_along(tmp_path: Path) -> None:
    with closing(Service(tmp_path, 3, "--no-node-secret-required")) as service:
        nodes = [service.node(rank) for rank in (1, 2)]
        service.wait_until_ready()
        assert any(f"127.0.0.1:{service.port} listens unprotected" in line for line in service.head.lines)
        engines = [each for node in nodes for each in engines_of(node)]
        assert len(engines) == 2
        service.head.process.kill()
        for node in nodes:
            assert node.wait() == 1
            assert node.lines[-1] == (
                f"stages: error: the head at 127.0.0.1:{service.port} is lost: it has died, or the network to it is cut; this node ends"
            )
        wait_until(lambda: not any(each.is_running() for each in engines), "the engines outlive their node")


@pytest.mark.slow
def test_an_engine_that_cannot_start_elsewhere_says_why(tmp_path: Path) -> None:
    with closing(Service(tmp_path)) as service:
        node = service.node(1, "--num-gpu-blocks-override=2")
        assert service.head.wait() == 1
        assert re.fullmatch(
            r"stages: error: engine 1 on \S+ \(pid \d+\): there is no room for the KV cache", service.head.lines[-1]
        )
        assert node.wait() == 0


def test_a_request_to_a_machine_that_has_just_died_leaves_the_hub_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request finds out, not the ping: the engine is gone, and the next machine may join."""
    monkeypatch.setattr(hub, "PING_SECONDS", 3600.0)
    config = EngineArgs.from_kwargs(
        model="gpt2-tiny", data_parallel_size=2, data_parallel_size_local=1, data_parallel_rpc_port=free_port(),
        data_parallel_address="127.0.0.1", node_secret_required=False,
    )  # fmt: skip
    head, contexts = NodeHub(config), (zmq.Context(), zmq.Context())

    def joined() -> tuple[Any, Connection]:
        remote = head.engine(1)
        inputs, _ = bind_sockets(contexts[0], remote)
        node = Connection(contexts[1], zmq.DEALER, head.address, None)
        node.send(CONTROL, encode(Join("n", [1], facts_of(config, EQUAL), time.monotonic_ns())))
        orders = []
        for _ in range(2):
            assert node.socket.poll(int(PATIENCE * 1000)), "nobody hears the machine"
            orders.append(decode_order(node.socket.recv_multipart()[1]))
        assert isinstance(orders[1], StartEngine)
        node.send(CONTROL, encode(EngineUp(1, remote.launch, EngineReady(10, 100))))
        remote.up.result(PATIENCE)
        inputs.recv_multipart()  # a sign that it is there
        return (remote, inputs), node

    try:
        (remote, inputs), node = joined()
        node.close()

        def is_gone() -> bool:
            inputs.send_multipart([remote.identity, b"a", b"request"])
            return bool(remote.gone.done())

        wait_until(is_gone, "the request is sent to nobody, and nobody notices")
        _, again = joined()
        again.close()
    finally:
        head.close()
        for context in contexts:
            context.destroy(linger=0)


def test_a_node_without_a_head_gives_up(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    flags = [
        "-dp=2",
        "-dpr=1",
        "-dpa=127.0.0.1",
        f"-dpp={(port := free_port())}",
        f"--node-secret-file={tmp_path / 'secret'}",
    ]
    node = ServerProcess("gpt2-tiny", "--headless", *flags, "--distributed-timeout-seconds=1", patch=PATCH)
    with closing(node):
        assert node.wait() == 1
        assert node.lines[-1] == (
            f"stages: error: no head answered at 127.0.0.1:{port} within 1 s (--data-parallel-address, --data-parallel-rpc-port)"
        )


@pytest.mark.slow
def test_a_signal_ends_a_node_that_waits_for_its_head() -> None:
    flags = ["-dp=2", "-dpr=1", "-dpa=127.0.0.1", f"-dpp={free_port()}", "--no-node-secret-required"]
    with closing(ServerProcess("gpt2-tiny", "--headless", *flags, patch=PATCH)) as node:
        node.wait_for("connecting")
        node.process.terminate()
        assert node.wait() == 0


def test_with_a_balancer_between_machines_each_has_its_own_engines() -> None:
    flags = ["-dp=4", "-dpl=2", "-dpr=2", "--data-parallel-hybrid-lb", "--server-dev-mode"]
    with closing(ServerProcess("gpt2-tiny", "--host=127.0.0.1", "--port=0", *flags, patch=PATCH)) as server:
        client = httpx.Client(base_url=server.wait_until_ready(), timeout=PATIENCE, trust_env=False)
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        assert [client.post("/v1/completions", json=body).status_code for _ in range(2)] == [200, 200]
        lines = client.get("/metrics").text.splitlines()
        for name in ("stages:engine_ready", "vllm:generation_tokens_total"):
            assert [line.partition('engine="')[2][0] for line in lines if line.startswith(name)] == ["2", "3"]
        refused = client.post("/scale_engines", json={"data_parallel_size": 3})
        assert refused.status_code == 409 and "is fixed" in refused.json()["error"]["message"]
        client.close()
