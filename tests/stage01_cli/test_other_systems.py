"""What other systems lack is done without, or refused in one line. No such system is at hand here: the functions that it lacks are taken out."""

from __future__ import annotations

import ast
import builtins
import ctypes
import io
import os
import resource
import sys
from pathlib import Path

import httpx
import pytest
from server_under_test import ServerProcess

from stage01_cli.main import main
from stage02_server.features.hardening.process import set_ulimit
from stage03_engine.args import processes
from stage03_engine.args.features.cores.cores import measure
from stage03_engine.core.features.cpu_binding.manifest import cores_of
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
STAGES = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels")
OF_LINUX = ["sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create"]
LIKE_MACOS = (
    f"""OF_LINUX = {OF_LINUX}"""
    + """
import builtins, ctypes, io, os, resource, sys
def asked_by_psutil():
    frame = sys._getframe()
    while frame is not None and "psutil" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None
for name in OF_LINUX:
    if hasattr(os, name):
        delattr(os, name)
def without_proc(function):
    def opened(file, *args, **more):
        if str(file).startswith(("/proc", "/sys")) and str(file) != "/proc/self/statm" and not asked_by_psutil():
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return function(file, *args, **more)
    return opened
builtins.open = io.open = without_proc(io.open)
setrlimit = resource.setrlimit
def stricter(which, limits):
    if which == resource.RLIMIT_NOFILE and limits[0] > 10240:
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(which, limits)
resource.setrlimit = stricter
class NoPrctl(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = NoPrctl
"""
)


def test_windows_itself_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["serve", "gpt2-tiny", "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.count("\n") == 1
        and "WSL 2" in shown.err
        and shown.err.startswith("stages: error: ")
    )


def test_without_affinity_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert measure().logical >= 1
    assert cores_of("auto") == cores_of(None) == set()
    with pytest.raises(ConfigError, match="this system binds no process to cores"):
        cores_of("0-1")


def test_a_limit_on_open_files_that_is_refused_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    set_ulimit()


@pytest.mark.parametrize("length", [5, 49, 60, 61, 300])
def test_the_paths_of_sockets_are_short_enough_for_macos(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/".ljust(length, "x"))
    folder = Path(processes.base_folder()) / f"{processes.PREFIX}held-abcdefgh"
    assert (
        max(len(f"{folder}/{name}") for name in ("handshake", "published", "output1000", processes.RENDEZVOUS)) <= 103
    )


def guards(tree: ast.AST, found: str) -> list[bool]:
    """For each statement that mentions it in this file: does it stand behind `if sys.platform == "linux"`?"""
    told = [
        ast.walk(each)
        for each in ast.walk(tree)
        if isinstance(each, ast.If) and "sys.platform" in ast.unparse(each.test)
    ]
    guarded = {id(node) for nodes in told for node in nodes}
    mentions = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Constant) and found in ast.unparse(node)
    ]
    return [id(node) in guarded for node in mentions]


@pytest.mark.parametrize("found", ["RLIMIT_AS", "/proc/self/statm"])
def test_what_would_fail_elsewhere_is_asked_of_linux_only(found: str) -> None:
    """The server below runs on Linux, where these are there."""
    files = [file for stage in STAGES for file in (ROOT / stage).rglob("*.py") if found in file.read_text()]
    assert len(files) >= 2
    for file in files:
        if file.name != "sandbox.py":  # which needs Linux as a whole, and says so
            assert all(guards(ast.parse(file.read_text()), found)), file


def test_an_engine_without_what_only_linux_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (os, OF_LINUX),
        (builtins, ["open"]),
        (io, ["open"]),
        (resource, ["setrlimit"]),
        (ctypes, ["CDLL"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name, None))  # it is put back
    exec(LIKE_MACOS, {})
    assert not hasattr(os, "pidfd_open")
    with pytest.raises(FileNotFoundError):
        Path("/proc/cpuinfo").read_text()
    [output] = LLM("gpt2-tiny", num_gpu_blocks_override=64).generate(["To be"], SamplingParams(max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.slow
def test_a_server_without_what_only_linux_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine and the processes for grammars and templates lack the same."""
    (tmp_path / "sitecustomize.py").write_text(LIKE_MACOS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    server = ServerProcess(
        "gpt2-tiny", "--port", "0", "--num-gpu-blocks-override", "64", "--trust-request-chat-template"
    )
    try:
        client = httpx.Client(base_url=server.wait_until_ready(), timeout=60)
        body = {
            "messages": [{"role": "user", "content": "To be"}],
            "max_tokens": 8,
            "chat_template": "{{ messages[0].content }}",
        }
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 8
        body = {"prompt": "To be", "guided_choice": ["yes", "no"]}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("yes", "no")
    finally:
        server.close()
