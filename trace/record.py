"""Make the recorded runs in `trace/recorded/`: small, each about one thing. `make recordings` runs this.

Each is a real server with the bundled model, its real clients, and `--trace`. Tokens and decisions are the same every time; the
times are those of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

RECORDED = Path(__file__).parent / "recorded"
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


@contextmanager
def server(name: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`stages serve gpt2-tiny` that records to `recorded/NAME`; ends it, unless it has ended already."""
    folder = RECORDED / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "stage01_cli", "serve", "gpt2-tiny", "--host", "127.0.0.1", "--port", "0"]
    command += [
        "--num-gpu-blocks-override",
        "64",
        "--prefix-caching-hash-seed",
        "recorded",
        "--trace",
        str(folder),
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if " on http://" in line:
            break
    else:
        raise SystemExit(f"{name}: the server did not start")
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        yield line.split(" on ")[-1].strip(), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def complete(url: str, prompt: str, max_tokens: int, name: str, **fields: object) -> str:
    """One streamed greedy completion; returns what came over HTTP."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=60)
    return answer.text


def together(url: str, requests: list[tuple[str, int]], **fields: object) -> None:
    """Completions at the same time, one thread each."""
    threads = [
        threading.Thread(target=complete, args=(url, prompt, length, f"r{i}"), kwargs=fields)
        for i, (prompt, length) in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_request() -> None:
    """One streamed request, the whole walk."""
    with server("one_request") as (url, _):
        complete(url, "ROMEO:", 8, "r0")


def mixed() -> None:
    """Eight requests of different lengths under a small token budget: chunked prefill beside decode."""
    with server("mixed", "--max-num-batched-tokens", "32", "--max-num-seqs", "6") as (url, _):
        together(url, [(prompt * (1 + 4 * (i % 3)), 6 + 3 * i) for i, prompt in enumerate(PROMPTS)])


def preemption() -> None:
    """More tokens than the KV cache holds: requests are preempted and come back."""
    flags = ("--num-gpu-blocks-override", "16", "--max-model-len", "96", "--block-size", "8")
    with server("preemption", *flags) as (url, _):
        together(url, [(prompt, 40) for prompt in PROMPTS])


def prefix_hits() -> None:
    """The same beginning again and again: later requests find it in the prefix cache."""
    with server("prefix_hits") as (url, _):
        beginning = "KING RICHARD: what a piece of work is a man, how noble in reason, how infinite in faculty; "
        for i, end in enumerate(["yes", "no", "yes", "I know not"]):
            complete(url, beginning + end, 6, f"r{i}")


def speculative() -> None:
    """N-gram drafts in a text that repeats itself."""
    with server("speculative", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}') as (url, _):
        complete(url, "la la la la la la la la", 24, "r0")


def client_abort() -> None:
    """A client leaves in the middle of its stream; another one stays."""
    with server("client_abort") as (url, _):
        body = {"prompt": "ROMEO:", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": "r0"}) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
        complete(url, "To be, or", 12, "r1")


def engine_death() -> None:
    """The engine process is killed in the middle of a request: kill -9."""
    with server("engine_death") as (url, process):
        body = {"prompt": "ROMEO:", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": "r0"}) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            for child in _children(process.pid):
                os.kill(child, signal.SIGKILL)
            for _ in lines:
                pass


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children() if "stage03_engine.core" in child.cmdline()]


RUNS: dict[str, Callable[[], None]] = {
    run.__name__: run for run in (one_request, mixed, preemption, prefix_hits, speculative, client_abort, engine_death)
}
"""Name of the folder -> what makes it."""


def main() -> None:
    """Make the named runs, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], metavar="NAME", help=f"one of {', '.join(RUNS)}")
    for name in parser.parse_args().names or RUNS:
        RUNS[name]()
        print(f"{name}: {sum(path.stat().st_size for path in (RECORDED / name).iterdir()) // 1000} kB")


if __name__ == "__main__":
    main()
