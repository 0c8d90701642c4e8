"""`--api-server-count 2`, and one of them dies or stands still: it is started again, and the clients of the other one notice nothing."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import psutil
import pytest
import zmq
from patience import PATIENCE, wait_until
from prometheus_client.parser import text_string_to_metric_families
from server_under_test import ServerProcess
from test_api_servers import (
    BODY,
    ECHO,
    FLAGS,
    LONG,
    Start,
    ask,
    connected_to,
    coordinator_of,
    folders,
    open_folders,
    pid_of,
    processes_of,
    wait_until_both_serve,
)

from stage03_engine.core.features.front_ends.core_proc import JOIN, SharedEngineCoreProc
from stage03_engine.core.features.front_ends.deliveries import Aborted, Deliveries, Joined, Left, Requests
from stage03_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType as Kind,
    SchedulerStats,
    UtilityRequest,
    encode,
)
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run

# A user's middleware whose process dies while it is imported, once the file is there.
DIES = """
import os, pathlib
if pathlib.Path({flag!r}).exists():
    {how}
class Layer:
    def __init__(self, app):
        self.app = app
    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)
"""


def kill(server: ServerProcess, name: str) -> int:
    """kill -9; returns the process id."""
    os.kill(pid := pid_of(server, name), signal.SIGKILL)
    return pid


def wait_until_it_serves_again(server: ServerProcess, name: str) -> None:
    server.wait_for(rf"\({name} pid=\d+\).* Serving \S+ on http")


def totals(client: httpx.Client) -> Counter[str]:
    """Metric -> its value, of all engines together."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] += sample.value  # type: ignore[assignment]
    return found


def middleware(folder: Path, how: str) -> tuple[str, Path]:
    """A patch that lets the servers find it, and the file whose presence makes them die."""
    flag = folder / "die"
    (folder / "dies.py").write_text(DIES.format(flag=str(flag), how=how))
    return (
        f"import os\nos.environ['PYTHONPATH'] = {str(folder)!r} + os.pathsep + os.environ.get('PYTHONPATH', '')",
        flag,
    )


HALT = "pathlib.Path({flag!r}).unlink(); os.kill(os.getpid(), 19)"
AS_SOON_AS_READY = f"""import stage02_server.launcher
    def halt():  # called for the line of the log that says so
        {HALT}
    stage02_server.launcher.seconds_since_start = halt"""


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


@pytest.mark.slow
def test_kill_9_under_streams(start_server: Start, tmp_path: Path) -> None:
    """Who is connected to the other one gets every token; the engines abort what the dead one had; and the next one counts on."""
    flags = ("--data-parallel-size", "2", "--kv-cache-memory-bytes", "50000000", "--trace", str(tmp_path))
    server = start_server("gpt2-tiny", *FLAGS, *flags)
    wait_until_both_serve(server)
    processes = processes_of(server)
    kept = open_folders(processes)
    text = ask(server, max_tokens=480)
    coordinator_of(server).suspend()  # nobody needs it: each server goes by what it sends itself
    for name in ("APIServer_0", "APIServer_1"):  # the first one has the statistics of the engines
        index = int(name[-1])
        lives = 1 - index
        with connected_to(server, lives) as client, connected_to(server, index) as lost, ThreadPoolExecutor(4) as pool:
            before = totals(client)
            cut = [pool.submit(lost.post, "/v1/completions", json=BODY | {"prompt": "ROMEO:", "max_tokens": 480})]
            wait_until(lambda: totals(client)["vllm:num_requests_running"] > 0, "the lost request does not run")
            with client.stream("POST", "/v1/completions", json=LONG) as answer:
                pieces = answer.iter_text()
                first = next(pieces)
                assert '"text"' in first
                old = kill(server, name)
                new = [pool.submit(ask, server, max_tokens=480) for _ in range(2)]  # new connections are accepted
                whole = first + "".join(pieces)
            assert whole.endswith("data: [DONE]\n\n") and '"error"' not in whole
            assert {each.result() for each in new} == {text}
            with pytest.raises(httpx.TransportError):
                cut[0].result()
            assert client.get("/health").status_code == 200
            wait_until_it_serves_again(server, name)
            for idle in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                wait_until(lambda idle=idle: totals(client)[f"vllm:{idle}"] == 0, f"{idle} stays")  # type: ignore[misc]
            after = totals(client)
            for counted in ("vllm:prefix_cache_queries_total", "vllm:prompt_tokens_total"):
                assert before[counted] < after[counted] <= before[counted] + 40, (before, after)
        assert pid_of(server, name) != old
        with connected_to(server, index) as client:
            assert client.post("/v1/completions", json=BODY | {"max_tokens": 480}).json()["choices"][0]["text"] == text
    processes += processes_of(server)
    server.process.terminate()
    assert server.wait() == 0
    assert not any("Traceback" in line for line in server.lines), server.lines
    assert gone(processes) and not kept & folders()
    run = read_run(tmp_path)
    assert [event.args for event in run.named("api_server.restarted")] == [
        {"index": 0, "restarts": 1, "total": 1}, {"index": 1, "restarts": 1, "total": 2},
    ]  # fmt: skip
    assert [event.args["exit_code"] for event in run.named("api_server.ended")] == [-9, -9, 0, 0]


@pytest.mark.slow
def test_an_engine_dies_while_a_server_starts_again(start_server: Start) -> None:
    server = start_server("gpt2-tiny", *FLAGS, "--data-parallel-size", "2", "--kv-cache-memory-bytes", "50000000")
    wait_until_both_serve(server)
    kill(server, "APIServer_1")
    kill(server, "EngineCore_DP0")
    wait_until_it_serves_again(server, "APIServer_1")
    with connected_to(server, 1) as client:
        wait_until(lambda: not client.get("/health").content, "the engine does not come back")
        client.post("/v1/completions", json=BODY | {"prompt": ["To be, or"] * 4}).raise_for_status()
    server.process.terminate()
    assert server.wait() == 0


@pytest.mark.slow
def test_both_die_at_once_and_connections_wait(start_server: Start) -> None:
    server = start_server(*ECHO)
    wait_until_both_serve(server)
    both = [psutil.Process(pid_of(server, f"APIServer_{index}")) for index in range(2)]
    for process in both:
        process.suspend()
    with ThreadPoolExecutor(1) as pool:
        for process in both:
            process.kill()
        later = pool.submit(ask, server)
        assert later.result()
    server.process.terminate()
    assert server.wait() == 0
    assert sum("it is started again" in line for line in server.lines) == 2


def test_one_death_more_than_is_allowed(start_server: Start) -> None:
    """And before it, who is connected to the other one gets every token, and the next one answers."""
    server = start_server(*ECHO, "--data-parallel-restart", "1")
    wait_until_both_serve(server)
    with connected_to(server, 0) as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
        pieces = answer.iter_text()
        next(pieces)
        kill(server, "APIServer_1")
        assert "".join(pieces).endswith("data: [DONE]\n\n")
    wait_until_it_serves_again(server, "APIServer_1")
    with connected_to(server, 1) as client:
        client.post("/v1/completions", json=BODY).raise_for_status()
    processes = processes_of(server)
    kill(server, "APIServer_0")
    assert server.wait() == 1
    [line] = [line for line in server.lines if "--data-parallel-restart 1 allows no further restart" in line]
    assert "APIServer_0 has ended unexpectedly (exit code -9" in line and gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise ValueError('no licence')"])
def test_a_server_that_dies_at_every_start_ends_all(start_server: Start, tmp_path: Path, how: str) -> None:
    patch, flag = middleware(tmp_path, how)
    server = start_server(*ECHO, "--middleware", "dies.Layer", patch=patch)
    wait_until_both_serve(server)
    processes = processes_of(server)
    flag.touch()
    with connected_to(server, 0) as client:
        kill(server, "APIServer_1")
        for number in range(1, 4):
            assert client.post("/v1/completions", json=BODY).status_code == 200
            server.wait_for(rf"it is started again \({number} of 3 restarts\)")
    assert server.wait() == 1
    [line] = [line for line in server.lines if "allows no further restart" in line]
    assert "APIServer_1 has ended" in line and ("no licence" in line) == ("no licence" in how)
    assert not any("Traceback" in line for line in server.lines), server.lines
    assert gone(processes)


def test_a_stopped_server_is_killed_and_started_again(start_server: Start) -> None:
    """Its own connections hang until then; new ones are taken by the other one."""
    server = start_server(*ECHO, "--engine-stall-seconds", "5")
    wait_until_both_serve(server)
    with connected_to(server, 0) as client, connected_to(server, 1) as lost, ThreadPoolExecutor(1) as pool:
        psutil.Process(pid_of(server, "APIServer_1")).suspend()
        cut = pool.submit(lost.post, "/v1/completions", json=BODY)
        assert len({ask(server) for _ in range(8)}) == 1
        server.wait_for("APIServer_1 has not answered for 5 s")
        with pytest.raises(httpx.TransportError):
            cut.result()
        wait_until_it_serves_again(server, "APIServer_1")
        assert client.get("/health").status_code == 200
    server.process.terminate()
    assert server.wait() == 0
    assert not any("APIServer_0 has not answered" in line for line in server.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [(HALT, "20 s (it is not ready yet)"), (AS_SOON_AS_READY, "5 s (--engine-stall-seconds)")],
    ids=["while it starts", "as soon as it is ready"],
)
def test_a_server_that_halts_before_it_has_answered_is_started_again(
    start_server: Start, tmp_path: Path, how: str, said: str
) -> None:
    """Asked for the first time, or not even that."""
    patch, flag = middleware(tmp_path, how.replace("{flag!r}", repr(str(tmp_path / "die"))))
    patch += "\nfrom stage02_server.features.api_servers import launch\nlaunch.START_SECONDS = 20"
    server = start_server(*ECHO, "--engine-stall-seconds", "5", "--middleware", "dies.Layer", patch=patch)
    wait_until_both_serve(server)
    flag.touch()
    kill(server, "APIServer_1")
    server.wait_for(re.escape(f"APIServer_1 has not answered for {said}"))
    wait_until_it_serves_again(server, "APIServer_1")
    with connected_to(server, 1) as client:
        client.post("/v1/completions", json=BODY).raise_for_status()
    server.process.terminate()
    assert server.wait() == 0


def stats(queries: int, running: int = 0) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        scheduler_stats=SchedulerStats(
            num_running=running, prefix_cache_queries=queries, counts={"drafts": 2 * queries}
        )
    )


class Sent:
    """Deliveries, and what each front end got. The sockets lead nowhere."""

    def __init__(self) -> None:
        self.context, self.requests = zmq.Context(), Requests()
        self.got: list[tuple[str, EngineCoreOutputs]] = []
        self.deliveries = Deliveries(self.context, 2, self.send, self.requests)

    def send(self, socket: zmq.Socket, outputs: EngineCoreOutputs) -> None:
        address = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.got.append((address.rpartition("-")[2], outputs))

    def counted(self) -> list[tuple[str, int, int]]:
        given = [(name, outputs.scheduler_stats) for name, outputs in self.got]
        return [(name, each.prefix_cache_queries, each.counts["drafts"]) for name, each in given if each is not None]

    def close(self) -> None:
        self.deliveries.end(b"")
        self.context.destroy(linger=0)


@pytest.fixture
def sent() -> Iterator[Sent]:
    made = Sent()
    yield made
    made.close()


def test_statistics_go_on_to_another_front_end_and_nothing_is_counted_twice(sent: Sent) -> None:
    handle = sent.deliveries.handle
    handle(Joined(0, "inproc://at-a"))
    handle(Joined(1, "inproc://at-b"))
    handle(stats(10))
    handle(Left(0))
    handle(stats(15))
    handle(Joined(0, "inproc://at-c"))  # it does not take them back: the gauges of the other one would stay
    handle(stats(16))
    handle(Left(1))
    handle(stats(20))
    assert sent.counted() == [("a", 10, 20), ("b", 5, 10), ("b", 6, 12), ("c", 4, 8)]


def test_an_id_is_free_again_behind_the_last_output_of_who_had_it(sent: Sent) -> None:
    """A process joins in the place of another before the busy loop has aborted what that one asked for."""
    proc: Any = SharedEngineCoreProc.__new__(SharedEngineCoreProc)  # without its threads and its core
    proc._requests, proc._num_front_ends, proc._present = sent.requests, 2, set()
    proc.input_queue, proc.output_queue = SimpleQueue(), SimpleQueue()
    request = EngineCoreRequest("same", [1], SamplingParams())

    def take(kind: Kind, message: Any) -> None:
        proc._take(0, [kind.value, encode(message)])

    def deliver() -> None:
        while not proc.output_queue.empty():
            sent.deliveries.handle(proc.output_queue.get())

    take(Kind.UTILITY, UtilityRequest(0, JOIN, args=["inproc://at-old"]))
    take(Kind.ADD, request)
    proc._leave(0)
    take(Kind.ADD, request)  # it was still on its way
    take(Kind.UTILITY, UtilityRequest(0, JOIN, args=["inproc://at-new"]))
    proc.output_queue.put(EngineCoreOutputs([EngineCoreOutput("same", [7], None, None)]))
    take(Kind.ADD, request)  # of the new one: too early
    deliver()
    told = [(name, output) for name, outputs in sent.got for output in outputs.outputs]
    [(name, refused)] = told
    assert name == "new" and "in use" in (refused.error or "") and not refused.new_token_ids
    assert (
        proc.input_queue.qsize() == 3
    )  # the first request, its abort, and the end of a watch that may be in the queue
    proc.output_queue.put(Aborted(["same"]))  # as the busy loop does on handling it
    deliver()
    take(Kind.ADD, request)
    assert proc.input_queue.qsize() == 4 and sent.requests.owners == {"same": 0}
