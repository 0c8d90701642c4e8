"""A process that the server starts ends with it, even one that is stopped when the server is killed, and so cannot see it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from patience import wait_until

ROOT = Path(__file__).parent.parent.parent
CHILDREN = {
    "stage02_server.features.api_servers": "0",
    "stage02_server.features.audio.process": "1 1",
    "stage02_server.features.chat_template.process": "",
    "stage02_server.features.images.process": "",
    "stage03_engine.core": "ipc://{folder}/handshake 0",
    "stage03_engine.core.features.distributed.fork_server": "{descriptor}",
    "stage03_engine.core.features.distributed.worker_process": "pipe:{descriptor}:{folder} 0 Worker_TP0",
    "stage03_engine.core.features.structured_output.grammar_checker": "[1000000000,true]",
    "stage03_engine.frontend.features.data_parallel.coordinator": "{folder}",
}
COMMANDS = {
    "stage02_server", "stage03_engine", "stage03_engine.bundled.training.train_gpt2_tiny", "stage02_server.features.page.openapi", "stage03_engine.core.features.quantization.accuracy",
    "stage03_engine.core.features.load_formats.save_sharded_state",
    "stage03_engine.bundled.training.train_gpt2_tiny_draft",
    "stage03_engine.bundled.training.train_adapter",
    "stage03_engine.core.features.kv_cache_dtype.accuracy",
    "stage03_engine.core.features.cuda_graphs.confirm",
}  # fmt: skip
"""What users start."""

STOPS = """
import os, signal, sys

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

class AtSlowImports:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "stage02_server.api_server"):
            stop()

class AtItsFirstMessage:
    @property
    def buffer(self):
        stop()
        return sys.__stdin__.buffer

sys.meta_path.insert(0, AtSlowImports())
sys.stdin = AtItsFirstMessage()
"""
PARENT = """
import signal, socket, subprocess, sys
ours, theirs = socket.socketpair()
words = sys.argv[1].format(folder=sys.argv[2], descriptor=theirs.fileno()).split()
command = [sys.executable, "-m", *words]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
print(child.pid, flush=True)
signal.pause()
"""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def test_these_are_all() -> None:
    files = [path for stage in ("stage02_server", "stage03_engine") for path in (ROOT / stage).rglob("*.py")]
    started = {module_of(path) for path in files if '__name__ == "__main__"' in path.read_text()}
    assert started - COMMANDS == CHILDREN.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes the children of a process that has died")
@pytest.mark.parametrize("module", CHILDREN)
def test_a_stopped_child_ends_with_its_parent(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops itself when it starts to import what takes seconds, or before it first hears of its parent."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(STOPS))
    (folder := tmp_path / "sockets").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'trace'}")
    words = f"{module} {CHILDREN[module]}"
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT, words, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        wait_until(lambda: child.status() == psutil.STATUS_STOPPED, "it does not stop")
        parent.kill()
        parent.communicate()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "it stays")
    finally:
        parent.kill()
        if child.is_running():
            child.kill()
