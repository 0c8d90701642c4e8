"""`--api-server-count 2`: two API servers, one port, one engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE, wait_until
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import InProcessServer, ServerProcess, byte_config
from watcher import Watcher

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.api_servers.launch import with_front_ends
from stage03_engine.args.processes import base_folder
from stage03_engine.errors import ConfigError
from stage03_engine.frontend.features.data_parallel.manifest import DataParallelConfig
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

FLAGS = ("--host", "127.0.0.1", "--port", "0", "--api-server-count", "2", "--timeout-keep-alive", "600")
ECHO = ("gpt2-tiny", "--engine", "echo", *FLAGS)
BODY = {"model": "gpt2-tiny", "prompt": "To be, or", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 480, "stream": True}
Start = Callable[..., ServerProcess]


def pid_of(server: ServerProcess, name: str) -> int:
    """That of `APIServer_0` and its like: it stands before each line of its log. Of an engine that was started again, the newest."""
    found = [match for line in server.lines if (match := re.search(rf"\({name} pid=(\d+)\)", line))]
    assert found, server.lines
    return int(found[-1][1])


def wait_until_both_serve(server: ServerProcess) -> str:
    url = server.wait_until_ready()
    server.wait_for(r"Serving \S+ on (http|unix)")
    return url


@contextmanager
def connected_to(server: ServerProcess, index: int) -> Iterator[httpx.Client]:
    """A client with one connection, which this server accepted: the other one slept meanwhile."""
    other = psutil.Process(pid_of(server, f"APIServer_{1 - index}"))
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False, limits=limits) as client:
        other.suspend()
        try:
            client.get("/version").raise_for_status()
        finally:
            other.resume()
        yield client


@contextmanager
def connected_to_both(server: ServerProcess) -> Iterator[list[httpx.Client]]:
    with connected_to(server, 0) as first, connected_to(server, 1) as second:
        yield [first, second]


@contextmanager
def waits_for_its_body(server: ServerProcess) -> Iterator[socket.socket]:
    """A request to the first server that runs until somebody sends its two last bytes."""
    url, other = httpx.URL(server.url), psutil.Process(pid_of(server, "APIServer_1"))
    other.suspend()
    with socket.create_connection((url.host, url.port or 80), timeout=PATIENCE) as sender:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sender.sendall(head + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert sender.recv(12) == b"HTTP/1.1 100"
        other.resume()
        yield sender


def processes_of(server: ServerProcess) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def folders() -> set[str]:
    return {name for name in os.listdir(base_folder()) if name.startswith("stages-")}


def open_folders(processes: list[psutil.Process]) -> set[str]:
    """The folders of the sockets and of the metrics of these processes."""
    names = {file.path for process in processes for file in process.open_files()}
    names |= {word for process in processes for word in process.cmdline()}  # the engine's has the address of its socket
    return {match[1] for name in names if (match := re.search(r"/(stages-(?:held-)?[a-z0-9_]{8})/", name))}


def samples(client: httpx.Client) -> dict[tuple[str, str], float]:
    """(name, the labels that matter) -> value."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    own = ("finished_reason", "reason", "state")
    return {
        (sample.name, "".join(sample.labels.get(name, "") for name in own)): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two API servers and a real engine; the last test ends them."""
    folder = tmp_path_factory.mktemp("trace")
    server = ServerProcess("gpt2-tiny", *FLAGS, "--trace", str(folder), "--kv-cache-memory-bytes", "50000000")
    server.folder = folder  # type: ignore[attr-defined]
    try:
        wait_until_both_serve(server)
        yield server
    finally:
        server.close()


@pytest.fixture
def clients(pair: ServerProcess) -> Iterator[list[httpx.Client]]:
    with connected_to_both(pair) as both:
        yield both


@pytest.mark.slow
def test_both_write_the_tokens_of_one(clients: list[httpx.Client]) -> None:
    llm = LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000)
    expected = llm.generate(["To be, or"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    for client in clients:
        whole = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        streamed = client.post("/v1/completions", json=BODY | {"stream": True}).text
        chunks = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
        assert chunks.pop() == "[DONE]"
        text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
        assert [whole, text] == [expected[0].outputs[0].text] * 2


def test_metrics_are_those_of_all(clients: list[httpx.Client]) -> None:
    tokens, ended = ("vllm:generation_tokens_total", ""), ("vllm:request_success_total", "length")
    before = samples(clients[0])
    for client in clients:
        client.post("/v1/completions", json=BODY).raise_for_status()
    # The last tokens are counted after they are sent.
    wait_until(lambda: samples(clients[0])[tokens] >= before[tokens] + 48, "tokens are missing")
    wait_until(lambda: samples(clients[0])["vllm:num_requests_running", ""] == 0, "requests stay")
    after = [samples(client) for client in clients]
    assert after[0] == after[1]
    assert after[0][tokens] - before[tokens] == 48 and after[0][ended] - before[ended] == 2
    queries, prompts = ("vllm:prefix_cache_queries_total", ""), ("vllm:prompt_tokens_total", "")
    # The engine's own count: once, not once per server.
    assert after[0][queries] - before[queries] == after[0][prompts] - before[prompts] > 0
    assert after[0]["vllm:cache_config_info", ""] == 1
    assert after[0]["stages:server_state", "ready"] == 1 and after[0]["stages:server_state", "failed"] == 0
    assert "pid=" not in clients[0].get("/metrics").text


def test_a_client_that_leaves_ends_its_request(clients: list[httpx.Client]) -> None:
    aborted = ("vllm:request_success_total", "abort")
    before = samples(clients[0])[aborted]
    with clients[1].stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    wait_until(lambda: samples(clients[0])[aborted] == before + 1, "the abort is not counted")
    wait_until(lambda: samples(clients[0])["vllm:num_requests_running", ""] == 0, "the request goes on")


def test_a_live_view_shows_the_requests_of_all(pair: ServerProcess, clients: list[httpx.Client]) -> None:
    def sees(events: Iterator[str], name: str) -> None:
        assert next(line for line in events if "sched.finished" in line and name in line)

    with connected_to_both(pair) as watchers, watchers[1].stream("GET", "/v1/engine/events") as stays:
        lines = stays.iter_lines()
        with watchers[0].stream("GET", "/v1/engine/events") as leaves:
            both = leaves.iter_lines()
            clients[0].post("/v1/completions", json=BODY, headers={"X-Request-Id": "one"}).raise_for_status()
            sees(lines, "one")
            sees(both, "one")
        clients[0].post("/v1/completions", json=BODY, headers={"X-Request-Id": "two"}).raise_for_status()
        sees(lines, "two")


def test_no_response_is_stored(clients: list[httpx.Client]) -> None:
    made = clients[0].post("/v1/responses", json={"input": "Hello", "max_output_tokens": 8, "store": True}).json()
    assert made["status"] in ("completed", "incomplete") and made["store"] is False
    for client in clients:
        assert client.get(f"/v1/responses/{made['id']}").status_code == 404
        again = client.post("/v1/responses", json={"input": "and", "previous_response_id": made["id"]})
        assert again.status_code == 404
        later = client.post("/v1/responses", json={"input": "Hello", "background": True})
        assert later.status_code == 400 and "--max-stored-responses" in later.json()["error"]["message"]


def test_the_log_warns_of_what_is_not_stored_and_of_more_servers_than_cores(pair: ServerProcess) -> None:
    assert any("With 2 API servers no response is stored" in line for line in pair.lines)
    assert not any("make nothing faster" in line for line in pair.lines) or (os.cpu_count() or 1) < 2


def test_one_engine_of_those_of_several_servers_needs_one_server() -> None:
    config = replace(byte_config(), data_parallel_config=DataParallelConfig(2, data_parallel_rank=1))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="data_parallel_rank needs api_server_count 1, not 2"):
        with_front_ends(config, FrontendArgs(api_server_count=2))


def test_keys_have_the_same_salts_in_every_server(make_server: Callable[..., InProcessServer]) -> None:
    sent = []
    for secret in ("a", "a", "b"):
        server = make_server(api_key=("one", "two"))
        server.app.state.tenants.share_salts(secret)
        requests: list[Any] = []
        server.engine.outgoing.append(requests.append)
        for key in ("one", "two"):
            body = {"prompt": "x", "max_tokens": 1}
            server.post("/v1/completions", body, headers={"x-api-key": key})
        sent.append([request.cache_salt for request in requests])
    assert sent[0] == sent[1] and len({*sent[0], *sent[2]}) == 4


# How it ends


def test_signals_drain_both_and_the_trace_has_a_lane_for_each(pair: ServerProcess) -> None:
    processes = processes_of(pair)
    kept = open_folders(processes)
    assert kept and kept <= folders()
    with connected_to_both(pair) as clients, clients[0].stream("POST", "/v1/completions", json=LONG) as answer:
        pieces = answer.iter_text()
        next(pieces)
        name = clients[1].post("/v1/completions", json=BODY).json()["id"]
        for process in processes:  # as a terminal does
            process.send_signal(signal.SIGTERM)
        assert "".join(pieces).endswith("data: [DONE]\n\n")
    assert pair.wait() == 0
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive and not kept & folders()
    run = read_run(pair.folder)  # type: ignore[attr-defined]
    procs = {event.pid: event.proc for event in run.events}
    assert sorted(procs.values()) == ["APIServer", "APIServer_0", "APIServer_1", "EngineCore_DP0"]
    spawned = {event.ref: event.args for event in run.named("api_server.spawned")}
    for started in run.named("api_server.started"):
        assert spawned[started.cause]["index"] == started.args["index"] and spawned[started.cause]["pid"] == started.pid
    assert [event.args["exit_code"] for event in run.named("api_server.ended")] == [0, 0]
    [received] = [e for e in run.named("zmq.request_received") if e.req == f"{name}-0"]
    sent = next(event for event in run.events if event.ref == received.cause)
    assert (procs[sent.pid], procs[received.pid]) == ("APIServer_1", "EngineCore_DP0")
    answered = {event.ref: event.pid for event in run.named("zmq.outputs_sent")}
    assert all(event.cause in answered for event in run.named("zmq.outputs_received") if event.args["num_outputs"])


@pytest.mark.slow
def test_the_end_of_a_unix_socket(start_server: Start, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = start_server(*ECHO, "--uds", str(path), "--shutdown-timeout", "1000")
    for _ in range(2):
        server.wait_for(r"Serving \S+ on unix:")
    transport = httpx.HTTPTransport(uds=str(path))
    body = LONG | {"max_tokens": 500}
    with httpx.Client(transport=transport, base_url="http://test", timeout=PATIENCE) as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_text()
            next(pieces)
            server.process.terminate()
            server.wait_for("SIGTERM: finishing")  # one of them; either may answer
            wait_until(lambda: client.get("/health").status_code == 503, "a server is ready still")
            server.process.terminate()  # the second one
            rest = "".join(pieces)
        assert "shut down" in rest or rest.endswith("data: [DONE]\n\n")
    assert server.wait() == 0
    assert not path.exists()


@pytest.mark.slow
def test_an_api_server_that_is_not_started_again_takes_the_others_along_when_they_are_done(start_server: Start) -> None:
    server = start_server(*ECHO, "--data-parallel-restart", "0")
    wait_until_both_serve(server)
    processes = processes_of(server)
    kept = open_folders(processes)
    with connected_to(server, 0) as client, waits_for_its_body(server) as sender:
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            pieces = answer.iter_text()
            next(pieces)
            os.kill(pid_of(server, "APIServer_1"), signal.SIGKILL)
            assert "".join(pieces).endswith("data: [DONE]\n\n")
        wait_until(lambda: client.get("/health").status_code == 503, "the other server is ready still")
        assert client.get("/health").json()["state"] == "draining"
        assert client.post("/v1/completions", json=BODY).status_code == 503
        sender.sendall(b"{}")  # the last request that it waits for
    assert server.wait() == 1
    assert any("APIServer_1 has ended unexpectedly (exit code -9" in line for line in server.lines)
    assert not psutil.wait_procs(processes, timeout=PATIENCE)[1] and not kept & folders()


def test_nothing_outlives_a_killed_launcher(start_server: Start) -> None:
    server = start_server("gpt2-tiny", *FLAGS, "--kv-cache-memory-bytes", "50000000")
    wait_until_both_serve(server)
    processes = processes_of(server)
    assert len(processes) == 4  # the launcher, two servers, the engine
    kept = open_folders(processes)
    server.process.kill()
    assert not psutil.wait_procs(processes[1:], timeout=PATIENCE)[1]
    assert kept and not kept & folders()


def says_that_it_is_dead(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 503
    except httpx.TransportError:  # it has ended meanwhile
        return True


@pytest.mark.slow
def test_all_servers_say_that_the_engine_is_dead_and_end(start_server: Start) -> None:
    server = start_server("gpt2-tiny", *FLAGS, "--kv-cache-memory-bytes", "50000000")
    wait_until_both_serve(server)
    processes = processes_of(server)
    with connected_to_both(server) as clients:
        with clients[0].stream("POST", "/v1/completions", json=LONG) as answer:
            pieces = answer.iter_text()
            next(pieces)
            servers = {server.process.pid, *(pid_of(server, f"APIServer_{index}") for index in range(2))}
            [engine] = [process for process in processes if process.pid not in servers]
            engine.kill()
            assert '"error"' in "".join(pieces)
        health = clients[0].get("/health")
        assert health.status_code == 503 and health.json()["state"] in ("failed", "draining")
        wait_until(lambda: says_that_it_is_dead(clients[1]), "the other server does not hear of it")
    assert server.wait() == 1
    assert not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def tokens_of_engines(client: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = (sample for family in families for sample in family.samples)
    return {each.labels["engine"]: each.value for each in found if each.name == "vllm:generation_tokens_total"}


def coordinator_of(server: ServerProcess) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    return next(child for child in children if "coordinator" in " ".join(child.cmdline()).lower())


def ask(server: ServerProcess, **body: Any) -> str:
    """The text of an answer on a connection of its own, or "" for the error of a stream whose engine died."""
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    if "stream" not in body:
        return answer.json()["choices"][0]["text"]
    *told, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(line.removeprefix("data: ")) for line in told]
    if "error" in chunks[-1]:
        assert chunks[-1]["error"]["code"] == 503
        return ""
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.slow
def test_two_servers_before_two_engines(start_server: Start, tmp_path: Path) -> None:
    """Both servers use both engines, and the coordinator tells them how much these have to do. An engine that dies is started again, as often
    as that may be, and so is the coordinator."""
    flags = ("--data-parallel-size", "2", "--kv-cache-memory-bytes", "50000000", "--trace", str(tmp_path))
    server = start_server("gpt2-tiny", *FLAGS, *flags, "--data-parallel-restart", "1")
    wait_until_both_serve(server)
    processes = processes_of(server)
    kept = open_folders(processes)
    watchers = [Watcher(server.url) for _ in range(2)]
    for watcher in watchers:
        for name in ("EngineCore_DP0", "EngineCore_DP1"):
            watcher.wait_for("sched.state", proc=name)
    with connected_to_both(server) as clients:
        texts = {client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] for client in clients * 3}
        drawn_once = [client.post("/v1/completions", json=BODY | {"temperature": 1}).json() for client in clients]
        assert len({answer["choices"][0]["text"] for answer in drawn_once}) == 2, "both servers draw the same seeds"
        with clients[0].stream("POST", "/v1/completions", json=LONG) as one:
            pieces = one.iter_text()
            next(pieces)
            body = BODY | {"prompt": ["To be, or"] * 4, "temperature": 1}
            drawn = [choice["text"] for choice in clients[1].post("/v1/completions", json=body).json()["choices"]]
            text = "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and len(texts) == 1 and len(set(drawn)) == 4
        # The last tokens are counted after they are sent.
        wait_until(lambda: sum(tokens_of_engines(clients[1]).values()) == 8 * 24 + 480 + 4 * 24, "tokens are missing")
        assert min(tokens_of_engines(clients[1]).values()) > 0
        for watcher in watchers:  # whichever server they reached: the requests of both, of each engine
            watcher.wait_for("sched.finished", 13)
            assert all(len(watcher.named("sched.token", name)) > 0 for name in ("EngineCore_DP0", "EngineCore_DP1"))

        engine, [text] = pid_of(server, "EngineCore_DP1"), texts
        with ThreadPoolExecutor(8) as pool, clients[0].stream("POST", "/v1/completions", json=LONG) as one:
            pieces = one.iter_text()
            next(pieces)
            whole = [pool.submit(ask, server) for _ in range(4)]
            streams = [pool.submit(ask, server, stream=True) for _ in range(4)]
            coordinator_of(server).kill()
            os.kill(engine, signal.SIGKILL)
            assert {each.result() for each in whole} == {text}
            assert {each.result() for each in streams} <= {text, ""}
            assert "".join(pieces).endswith("data: [DONE]\n\n")
            for client in (clients[1], clients[0]):
                wait_until(
                    lambda client=client: samples(client)["stages:engine_restarts_total", ""] == 1,
                    "a server does not know of the death",
                )  # type: ignore[misc]
                wait_until(lambda client=client: not client.get("/health").content, "the engine does not come back")  # type: ignore[misc]
            for watcher in watchers:  # the beginning, the death, the start, and the engine is ready again
                watcher.wait_for("dp.engines", 4)
                watcher.wait_for("sched.state", 2, "EngineCore_DP1")
        assert any(
            "DPCoordinator ended unexpectedly (exit code -9" in line and line.endswith("it is started again.")
            for line in server.lines
        )
        before = tokens_of_engines(clients[0])["1"]
        for client in clients:
            client.post("/v1/completions", json=BODY | {"prompt": ["To be, or"] * 4}).raise_for_status()
        wait_until(lambda: tokens_of_engines(clients[0])["1"] > before, "the engine that came back does nothing")
        processes += processes_of(server)
        os.kill(pid_of(server, "EngineCore_DP1"), signal.SIGKILL)
        for client in clients:
            wait_until(lambda client=client: client.get("/health").status_code == 503, "a server does not know it")  # type: ignore[misc]
    assert server.wait() == 1
    assert not any("Traceback" in line for line in server.lines), server.lines
    assert not psutil.wait_procs(processes, timeout=PATIENCE)[1] and not kept & folders()
    run = read_run(tmp_path)
    assert {event.proc for event in run.events} == {
        "APIServer", "APIServer_0", "APIServer_1", "DPCoordinator", "EngineCore_DP0", "EngineCore_DP1",
    }  # fmt: skip
    assert {event.proc for event in run.named("dp.counts_received")} == {"APIServer_0", "APIServer_1"}
    assert {event.proc for event in run.named("dp.counts_sent")} <= {"APIServer_0", "APIServer_1"}
    assert {event.proc for event in run.named("dp.engine_lost")} == {"APIServer_0", "APIServer_1"}
    assert len(run.named("dp.engine_joined")) == 2 * 3


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_one_line(start_server: Start) -> None:
    server = start_server("gpt2-tiny", *FLAGS, "--kv-cache-memory-bytes", "1")
    assert server.wait() == 1
    said = [line for line in server.lines if line.startswith("stages: error: ")]
    assert len(said) == 1 and "--kv-cache-memory-bytes" in said[0]
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.slow
def test_servers_that_cannot_start_are_one_line(start_server: Start) -> None:
    server = start_server(*ECHO, "--middleware", "no_such_module.Layer")
    assert server.wait() == 2
    assert len([line for line in server.lines if line.startswith("stages: error: ")]) == 1
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.slow
def test_a_signal_during_start_up_ends_all(start_server: Start) -> None:
    server = start_server("gpt2-tiny", *FLAGS, "--kv-cache-memory-bytes", "50000000")
    server.wait_for("HTTP is up")
    processes = processes_of(server)
    server.process.terminate()
    assert server.wait() == 0
    assert not psutil.wait_procs(processes, timeout=PATIENCE)[1]
