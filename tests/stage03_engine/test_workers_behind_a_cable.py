"""One engine over two machines with a network between them: two network namespaces and a cable, which can be cut.

Needs root and `ip netns`, and takes half a minute: only with `-m long`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE, wait_until

from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.check.invariants import check

HEAD, OTHER = "10.77.15.1", "10.77.15.2"
PORT = "29501"
SECRET = "a secret of these tests"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces, each with one end of a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip")
    names = (f"head-{os.getpid()}", f"other-{os.getpid()}")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the system allows no network namespaces: {error.stderr.decode().strip()}")
        for name, address in zip(names, (HEAD, OTHER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


SCRIPT = """
    import json, sys
    from stage03_engine.errors import EngineDeadError
    from stage03_engine.llm import LLM
    from stage03_engine.sampling_params import SamplingParams
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    settings = {"kv_cache_memory_bytes": 50_000_000, "tensor_parallel_size": 2, "nnodes": 2, "master_addr": sys.argv[1]}
    try:
        with LLM("gpt2-tiny", trace=sys.argv[2], **settings) as llm:
            print(json.dumps([o.outputs[0].token_ids for o in llm.generate(["To be, or", "ROMEO:"], params)]), flush=True)
            while sys.argv[3] == "forever":
                llm.generate("O", params)
    except EngineDeadError as error:
        print(error, flush=True)
"""


class Both:
    """The head, which generates, and the other machine."""

    def __init__(self, machines: tuple[str, str], folder: Path, how_long: str) -> None:
        words = ["--headless", "--nnodes", "2", "--node-rank", "1", "--master-addr", HEAD, "--master-port", PORT]
        self.other = self._start(machines[1], "-m", "stage02_server", "serve", "gpt2-tiny", *words)
        self.head = self._start(machines[0], "-c", textwrap.dedent(SCRIPT), HEAD, str(folder), how_long)
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.other.stderr or ()), daemon=True)
        self._reader.start()

    def _start(self, machine: str, *words: str) -> subprocess.Popen[str]:
        pipe, environment = subprocess.PIPE, os.environ | {"STAGES_NODE_SECRET": SECRET}
        command = ["ip", "netns", "exec", machine, sys.executable, *words]
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    def end(self) -> tuple[int, int]:
        """The exit codes."""
        codes = self.head.wait(PATIENCE), self.other.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return codes

    def children(self) -> list[psutil.Process]:
        return [each for top in (self.head, self.other) for each in psutil.Process(top.pid).children(recursive=True)]

    def close(self) -> None:
        for each in (self.head, self.other):
            each.kill()
            each.wait()


@pytest.mark.long
def test_both_work_and_their_recordings_are_one(machines: tuple[str, str], tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(["To be, or", "ROMEO:"], params)]
    both = Both(machines, tmp_path, "once")
    try:
        out, err = both.head.communicate(timeout=PATIENCE)
        assert json.loads(out.splitlines()[0]) == expected, err
        assert both.end() == (0, 0), (err, both.said)
    finally:
        both.close()
    assert {event.proc for event in read_run(tmp_path).events} == {"LLM", "Worker_TP0", "Worker_TP1"}
    assert check(tmp_path).consistent


@pytest.mark.long
def test_a_cut_cable_ends_both(machines: tuple[str, str], tmp_path: Path) -> None:
    both = Both(machines, tmp_path, "forever")
    try:
        assert both.head.stdout is not None
        assert json.loads(both.head.stdout.readline())
        children = both.children()
        ip("-n", machines[1], "link", "set", "cable", "down")
        assert "machine 1 is gone: its process was killed, or the network is cut" in both.head.stdout.readline()
        assert both.end() == (0, 2)
        assert any(f"the head at tcp://{HEAD}:29502 is gone" in line for line in both.said), both.said
        wait_until(lambda: not any(map(psutil.Process.is_running, children)), "a process stays")
    finally:
        both.close()
