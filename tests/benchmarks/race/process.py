"""The engines' processes: started, asked under a time limit, and ended with all that they have started themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

import psutil

from race.client import send_all
from race.entrant import Command, Entrant, Failed, Setup


class Engine:
    """A process of an entrant, and the log of what it says."""

    pipe = False  # it answers on stdout

    def __init__(self, entrant: Entrant, kind: str, command: Command, setup: Setup, limit: float) -> None:
        self.entrant, self.setup, self.limit = entrant, setup, limit
        self.log = setup.folder / "logs" / f"{entrant.name.replace(' ', '-')}-{kind}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    command.argv, env=command.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE if self.pipe else log,
                    stderr=log, cwd=setup.folder, bufsize=0,
                )  # fmt: skip
            except OSError as error:
                raise Failed(f"cannot be started: {error}") from None
        self.watched = psutil.Process(self.process.pid)
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Return when the model is loaded. Raises Failed."""
        raise NotImplementedError

    def run(self, workload: str, seed: int) -> dict[str, float]:
        """One repetition: what was measured. Raises Failed."""
        raise NotImplementedError

    def died(self) -> Failed:
        """What to raise for a process that ended: its code, and the last line of its log."""
        code = self.process.wait()
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return Failed(
            f"ended with code {code}: {lines[-1].strip()[:200] if lines else 'without a word'} (see {self.log})"
        )

    def hangs(self, what: str) -> Failed:
        """What to raise when the time is up."""
        return Failed(f"{what} took more than {self.limit:g} s (see {self.log})")

    def pause(self) -> None:
        """Stop it and its children until `resume`: some engines compute while they wait, and would take that from the one whose turn it is."""
        for each in family(self.watched):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()

    def resume(self) -> None:
        """Let it go on."""
        for each in family(self.watched):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()

    def close(self) -> None:
        """End it and its children: with a request first, by force after ten seconds."""
        self.resume()  # one that is stopped hears no request
        end(self.watched)
        with contextlib.suppress(OSError):
            for pipe in filter(None, (self.process.stdin, self.process.stdout)):
                pipe.close()
        self.process.wait()


class Offline(Engine):
    """Without HTTP: worker.py in the engine's own Python, a line in and a line out."""

    pipe = True
    sample: list[int]  # tokens after a fixed prompt

    def __init__(self, entrant: Entrant, setup: Setup, limit: float) -> None:
        assert entrant.offline is not None
        super().__init__(entrant, "offline", entrant.offline, setup, limit)

    def wait_until_ready(self) -> None:
        """Read the first line."""
        self.sample = self._answer("the start")["sample"]

    def run(self, workload: str, seed: int) -> dict[str, float]:
        """Ask, and wait for the line."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"workload": workload, "seed": seed}).encode() + b"\n")
        except OSError:
            raise self.died() from None
        answer = self._answer(workload)
        if "error" in answer:
            raise Failed(f"{answer['error']} (see {self.log})")
        measures: dict[str, float] = answer["measures"]
        return measures

    def _answer(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.limit)[0]:
            raise self.hangs(what)
        line = self.process.stdout.readline()
        if not line:
            raise self.died()
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server(Engine):
    """An OpenAI-compatible server on a free port."""

    def __init__(self, entrant: Entrant, setup: Setup, limit: float) -> None:
        assert entrant.server is not None
        self.port = free_port()
        super().__init__(entrant, "server", entrant.server(self.port), setup, limit)

    def wait_until_ready(self) -> None:
        """Ask /health until it is 200."""
        until = time.monotonic() + self.limit
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise self.died()
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.2)
        raise self.hangs("the start")

    def run(self, workload: str, seed: int) -> dict[str, float]:
        """All clients at once."""
        load = send_all(self.port, workload, self.setup.scale, seed)
        try:
            return asyncio.run(asyncio.wait_for(load, self.limit))
        except TimeoutError:
            raise self.hangs(workload) from None
        except (OSError, ValueError) as error:
            if self.process.poll() is not None:
                raise self.died() from None
            raise Failed(f"{type(error).__name__}: {error} (see {self.log})") from None


def prepare(entrant: Entrant, limit: float) -> None:
    """Run what an entrant needs before it starts. Raises Failed."""
    if entrant.prepare is None:
        return
    command = entrant.prepare
    try:
        result = subprocess.run(command.argv, env=command.environ(), capture_output=True, text=True, timeout=limit)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from None
    if result.returncode != 0:
        raise Failed((result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1])


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that it has started; empty if it is gone."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(process: psutil.Process) -> None:
    """End a process and its children: politely, then by force after ten seconds."""
    members = family(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
    _, alive = psutil.wait_procs(members, timeout=10)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, timeout=10)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
