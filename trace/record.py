"""Make the recorded runs in `trace/recorded/`: small, each about one thing. `make recordings` runs this.

Each is a real server with the bundled model, its real clients, and `--trace`. Tokens and decisions are the same every time
(`notebooks/gathering.py` says how); times, process ids and the suffixes of request ids differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
ARRIVAL_SECONDS = 30.0  # how long a request may take to reach the scheduler
POLL_SECONDS = 0.002
PROMPTS = [
    "ROMEO:",
    "To be, or not to be",
    "KING RICHARD: my lord",
    "What news",
    "All:",
    "JULIET: good night",
    "First Citizen:",
    "O",
]
Requests = list[tuple[str, int]]
"""(prompt, how many tokens to answer with); their ids are r0, r1, ..."""


class Server:
    """`stages serve gpt2-tiny` that records to a folder."""

    def __init__(self, url: str, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self._client = httpx.Client(base_url=url, timeout=60, verify=False)  # verify: to load no certificates

    def ask(self, name: str, prompt: str, max_tokens: int) -> None:
        """One greedy completion that is sent as a whole."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._client.post("/v1/completions", json=body, headers={"X-Request-Id": name})

    def stream(
        self, name: str, prompt: str, max_tokens: int, meanwhile: Callable[[], bool] | None = None, **fields: float
    ) -> None:
        """One streamed completion, greedy unless `fields` say otherwise. `meanwhile` is called after the first line; if it returns True
        the client leaves."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= fields
        headers = {"X-Request-Id": name}
        with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == 0 and meanwhile is not None and meanwhile():
                    return

    @contextmanager
    def of_one_process(self, number: int) -> Iterator[Server]:
        """One of several API servers: its connection is opened while the other one is stopped, with the first request."""
        others = [path for path in self.folder.glob("APIServer_*.jsonl") if f"APIServer_{number}-" not in path.name]
        stopped = [psutil.Process(int(path.stem.rpartition("-")[2])) for path in others]
        for process in stopped:
            process.suspend()
        try:
            yield Server(str(self._client.base_url), self.process, self.folder)
        finally:
            for process in stopped:
                process.resume()

    def together(self, requests: Requests, leaves_at_step: int = 0) -> None:
        """All at the same time, one client each; they arrive in this order. The first leaves after a step, if one is given."""

        def at_step() -> bool:
            self.wait_for_steps(leaves_at_step)
            return True

        clients = []
        for i, (prompt, length) in enumerate(requests):
            meanwhile = at_step if leaves_at_step and i == 0 else None
            client = threading.Thread(target=self.stream, args=(f"r{i}", prompt, length, meanwhile))
            client.start()
            clients.append(client)
            self.wait_for_arrival(f"r{i}")
        for client in clients:
            client.join()

    def wait_for_steps(self, count: int) -> None:
        """Wait until the engine's file holds this many steps; its buffer does not count."""
        while sum(path.read_bytes().count(b'"sched.output"') for path in self.folder.glob("EngineCore*")) < count:
            time.sleep(POLL_SECONDS)

    def wait_for_arrival(self, name: str) -> None:
        """Wait until the engine has queued the request, as its recording says: an idle engine writes out its buffer."""
        deadline = time.monotonic() + ARRIVAL_SECONDS
        signs = b'"name":"sched.queued"', f'"req":"cmpl-{name}-'.encode()
        while time.monotonic() < deadline:
            lines = [line for path in self.folder.glob("EngineCore*.jsonl") for line in path.read_bytes().splitlines()]
            if any(all(sign in line for sign in signs) for line in lines):
                return
            time.sleep(POLL_SECONDS)
        raise SystemExit(f"{self.folder.name}: the engine did not get request {name}")

    def wait_for_engines(self, count: int) -> None:
        """Wait until so many engines have joined, those that were started again included."""
        while sum(path.read_bytes().count(b'"dp.engine_joined"') for path in self.folder.glob("APIServer*")) < count:
            time.sleep(POLL_SECONDS)

    def kill_engine_number(self, number: int) -> None:
        """kill -9 of one of several engines."""
        [path] = self.folder.glob(f"EngineCore_DP{number}-*.jsonl")
        os.kill(int(path.stem.rpartition("-")[2]), signal.SIGKILL)

    def kill_engine(self) -> None:
        """kill -9."""
        for child in psutil.Process(self.process.pid).children():
            if any("stage03_engine.core" in part for part in child.cmdline()):  # its title may be one part
                os.kill(child.pid, signal.SIGKILL)


@contextmanager
def serving(
    name: str, *flags: str, gather: int = 0, abort_step: int = 0, scheduler: str = "", beside: Sequence[str] = ()
) -> Iterator[Server]:
    """A server that records to `recorded/NAME`, and ends.

    gather       the engine begins when this many requests have arrived
    abort_step   after this step it waits for a client to leave
    scheduler    the class to use instead of the one that gathers
    beside       flags of another machine's `serve`, in place of `flags`
    """
    folder = RECORDED / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", "0"]
    command += ["--num-gpu-blocks-override", "64", "--prefix-caching-hash-seed", "recorded"]
    command += ["--trace", f"recorded/{name}", "--trace-prompts"]
    if gather or scheduler:
        command += ["--scheduler-cls", scheduler or "gathering:Gathering"]
    search = os.pathsep.join(
        [str(HERE), str(HERE.parent), str(HERE.parent / "notebooks"), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
    environment |= {"GATHER_REQUESTS": str(gather), "GATHER_ABORT_STEP": str(abort_step)}
    process = subprocess.Popen([*command, *flags], cwd=HERE, env=environment, stderr=subprocess.PIPE, text=True)
    node = (
        subprocess.Popen([*command, *beside], cwd=HERE, env=environment, stderr=subprocess.DEVNULL) if beside else None
    )
    try:
        yield Server(_url(name, process), process, folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        if node is not None:  # it ends when the head does
            node.wait()
    _forget_paths(folder)


def _url(name: str, process: subprocess.Popen[str]) -> str:
    """Where the server listens, once it does; from then on its log is read and dropped."""
    assert process.stderr is not None
    log = []
    for line in process.stderr:
        log.append(line)
        if " on http://" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line.split(" on ")[-1].strip()
    raise SystemExit(f"{name}: the server did not start\n{''.join(log)}")


def _forget_paths(folder: Path) -> None:
    """Remove where this repository and the sockets were."""
    for path in folder.glob("*.jsonl"):
        text = path.read_bytes()
        for place in (HERE.parent, Path(tempfile.gettempdir())):
            text = text.replace(f"{place}/".encode(), b"")
        path.write_bytes(text)


def one_request() -> None:
    """One streamed request, the whole walk."""
    with serving("one_request") as server:
        server.stream("r0", "ROMEO:", 8)


def chances() -> None:
    """Two answers to one prompt, greedy and drawn at random, whose clients ask for logprobs: what each token could have been."""
    with serving("chances", gather=2) as server:
        drawn = {"temperature": 1.0, "seed": 7}
        clients = [
            threading.Thread(target=server.stream, args=(name, "To be, or", 14), kwargs={"logprobs": 5, **fields})
            for name, fields in (("greedy", {}), ("drawn", drawn))
        ]
        for client, name in zip(clients, ("greedy", "drawn"), strict=True):
            client.start()
            server.wait_for_arrival(name)
        for client in clients:
            client.join()


def mixed() -> None:
    """Eight requests of different lengths under a small token budget: chunked prefill next to decode."""
    with serving("mixed", "--max-num-batched-tokens", "32", "--max-num-seqs", "6", gather=8) as server:
        server.together([(prompt * (1 + 4 * (i % 3)), 6 + 3 * i) for i, prompt in enumerate(PROMPTS)])


def preemption() -> None:
    """More tokens than the KV cache holds: requests are preempted and come back."""
    flags = ("--num-gpu-blocks-override", "16", "--max-model-len", "96", "--block-size", "8")
    with serving("preemption", *flags, gather=8) as server:
        server.together([(prompt, 28) for prompt in PROMPTS])


def prefix_hits() -> None:
    """The same beginning again and again: later requests find it in the prefix cache."""
    with serving("prefix_hits") as server:
        beginning = "KING RICHARD: what a piece of work is a man, how noble in reason, how infinite in faculty; "
        for i, end in enumerate(["yes", "no", "yes", "I know not"]):
            server.stream(f"r{i}", beginning + end, 6)


def speculative() -> None:
    """N-gram drafts: while the text repeats they are accepted, where it changes they are rejected."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
    with serving("speculative", "--speculative-config", drafts) as server:
        server.stream("r0", "First Citizen: We are accounted poor citizens. Second Citizen: We are", 40)


def client_abort() -> None:
    """A client leaves in the middle of its stream; another one stays."""
    with serving("client_abort", gather=2, abort_step=8) as server:
        server.together([("ROMEO:", 400), ("To be, or", 16)], leaves_at_step=8)


def engine_death() -> None:
    """The engine process is killed in the middle of a request, after another one is complete: kill -9."""

    def kill() -> bool:
        server.wait_for_steps(8 + 40)
        server.kill_engine()
        return False

    with serving("engine_death") as server:
        server.stream("r0", "To be, or", 8)
        server.stream("r1", "ROMEO:", 500, meanwhile=kill)


def tp2() -> None:
    """Two workers that share every layer: what a step sends to them, and what they exchange."""
    with serving("tp2", "--tensor-parallel-size", "2", gather=2) as server:
        server.together([(PROMPTS[0], 6), (PROMPTS[1], 8)])


def pp2() -> None:
    """Two pipeline stages: the chunks of a prompt follow each other, so two steps are in flight; its answer has one at a time."""
    with serving(
        "pp2", "--pipeline-parallel-size", "2", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"
    ) as server:
        server.stream("r0", "Now is the winter of our discontent made glorious summer by this sun of York; " * 3, 8)
        server.stream("r1", PROMPTS[0], 6)


def dp2() -> None:
    """Two engines. The second request comes while the first engine is busy; later ones go where their beginning is cached."""
    beginnings = [
        "KING RICHARD: what a piece of work is a man, how noble in reason, how infinite in faculty; ",
        "JULIET: good night, good night! parting is such sweet sorrow, that I shall say good night; ",
    ]
    clients: list[threading.Thread] = []

    def second() -> bool:
        clients.append(threading.Thread(target=server.stream, args=("r1", beginnings[1] + "yes", 12)))
        clients[0].start()
        return False

    with serving("dp2", "--data-parallel-size", "2", "--data-parallel-routing", "prefix") as server:
        server.stream("r0", beginnings[0] + "yes", 72, meanwhile=second)
        clients[0].join()
        for i, beginning in enumerate([*beginnings, *beginnings], start=2):
            server.stream(f"r{i}", beginning + ("no" if i < 4 else "I know not"), 8)


def dp2_death() -> None:
    """kill -9 of one of two engines: a stream of its and an answer that is sent as a whole are computed again by the other."""
    clients: list[threading.Thread] = []

    def start(target: Callable[..., None], *args: object) -> bool:
        clients.append(threading.Thread(target=target, args=args))
        clients[-1].start()
        return False

    def both_run() -> bool:  # so the third request finds both engines with one, and gets the first
        start(server.ask, "r2", PROMPTS[2], 40)
        server.wait_for_arrival("r2")
        server.kill_engine_number(0)
        return False

    with serving("dp2_death", "--data-parallel-size", "2") as server:
        server.stream("r0", PROMPTS[0], 80, lambda: start(server.stream, "r1", PROMPTS[1], 60, both_run))
        for client in clients:
            client.join()
        server.wait_for_engines(3)


def nodes2() -> None:
    """Two machines with an engine each, behind the API server of the first one: the second request comes while the first engine is busy.
    Both are this machine, so their clocks are the same."""
    clients: list[threading.Thread] = []
    engines = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1")
    engines += ("--no-node-secret-required",)

    def second() -> bool:
        clients.append(threading.Thread(target=server.stream, args=("r1", PROMPTS[1], 8)))
        clients[0].start()
        return False

    beside = (*engines, "--headless", "--data-parallel-start-rank", "1")
    with serving("nodes2", *engines, beside=beside) as server:
        server.stream("r0", PROMPTS[0], 24, meanwhile=second)
        clients[0].join()


def servers2() -> None:
    """Two API servers in front of one engine: each has a request of its own, then both have one at the same time."""
    with serving("servers2", "--api-server-count", "2") as server:
        with server.of_one_process(0) as first:
            first.stream("r0", PROMPTS[0], 4)
        with server.of_one_process(1) as second:
            second.stream("r1", PROMPTS[1], 4)
        other = threading.Thread(target=second.stream, args=("r3", PROMPTS[3], 6))
        first.stream("r2", PROMPTS[2], 12, meanwhile=lambda: bool(other.start()))
        other.join()


def bug_starvation(name: str = "bug_starvation", scheduler: str = "buggy_schedulers:Overtaken") -> None:
    """Planted bug: new requests overtake preempted ones."""
    flags = ("--num-gpu-blocks-override", "13", "--max-model-len", "64", "--block-size", "8", "--max-num-seqs", "4")
    with serving(name, *flags, gather=8, scheduler=scheduler) as server:
        server.together([(prompt, 28 if i < 4 else 16) for i, prompt in enumerate(PROMPTS)])


def bug_leak(name: str = "bug_leak", scheduler: str = "buggy_schedulers:Leaking") -> None:
    """Planted bug: the blocks of a request that its client aborted are never freed."""
    flags = ("--num-gpu-blocks-override", "17", "--max-model-len", "96", "--block-size", "8")
    with serving(name, *flags, gather=5, abort_step=12, scheduler=scheduler) as server:
        requests = [("O, she doth teach the torches to burn bright! " * 2, 48), *((p, 24) for p in PROMPTS[1:5])]
        server.together(requests, leaves_at_step=12)


def bug_stall(name: str = "bug_stall", scheduler: str = "buggy_schedulers:Stalling") -> None:
    """Planted bug: while a long prompt is computed, no other request gets a token."""
    flags = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    with serving(name, *flags, gather=4, scheduler=scheduler) as server:
        long = "Now is the winter of our discontent made glorious summer by this sun of York; " * 14
        server.together([(PROMPTS[1], 24), (PROMPTS[2], 24), (PROMPTS[5], 24), (long, 6)])


def _healthy(run: Callable[[str, str], None]) -> Callable[[], None]:
    """The same requests with the scheduler that has no bug."""
    return lambda: run(f"{run.__name__}_healthy", "gathering:Gathering")


BUGS = (bug_starvation, bug_leak, bug_stall)
RUNS: dict[str, Callable[[], None]] = {
    run.__name__: run
    for run in (
        one_request,
        chances,
        mixed,
        preemption,
        prefix_hits,
        speculative,
        client_abort,
        engine_death,
        tp2,
        pp2,
        dp2,
        dp2_death,
        nodes2,
        servers2,
    )
}
"""Name of the folder -> what makes it."""
RUNS |= {bug.__name__: bug for bug in BUGS} | {f"{bug.__name__}_healthy": _healthy(bug) for bug in BUGS}


def main() -> None:
    """Make the named runs, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], metavar="NAME", help=f"one of {', '.join(RUNS)}")
    for name in parser.parse_args().names or RUNS:
        RUNS[name]()
        print(f"{name}: {sum(path.stat().st_size for path in (RECORDED / name).iterdir()) // 1000} kB", flush=True)


if __name__ == "__main__":
    main()
