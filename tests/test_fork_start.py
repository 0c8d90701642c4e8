"""A process that is forked is told from one that a user starts by nothing that a test looks at (`fork_start.py`).

Each case runs twice, forked and not, and must show the same: what the process sees of itself, what it writes, and how it ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fork_start
import psutil
import pytest
from fork_image import PACKAGES
from patience import PATIENCE, wait_until
from server_under_test import ServerProcess

pytestmark = pytest.mark.skipif(not fork_start.IS_ON, reason="processes are not forked here")


@pytest.mark.parametrize("name", [*fork_start.BOUNDED, *fork_start.LEAVES, *fork_start.SET_THREADS])
def test_every_module_that_is_named_is_there(name: str) -> None:
    """One that has moved would be started as if nothing were special about it."""
    assert importlib.util.find_spec(name), name


SEES = """
import json, os, resource, signal, sys
streams = [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.fileno()] for s in (sys.stdin, sys.stdout, sys.stderr)]
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags), "modules": sorted(sys.modules), "streams": streams,
    "environment": dict(os.environ), "cwd": os.getcwd(), "parent": os.getppid(), "own_session": os.getsid(0) == os.getpid(),
    "own_group": os.getpgid(0) == os.getpid(), "umask": os.umask(0o77), "limits": [resource.getrlimit(n) for n in range(16)],
    "cores": sorted(os.sched_getaffinity(0)), "nice": os.nice(0), "descriptors": [n for n in map(int, os.listdir("/proc/self/fd")) if n < 900],
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), "threads": len(os.listdir("/proc/self/task")),
    "handlers": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())], "comm": open("/proc/self/comm").read(),
    "main": sorted(vars(sys.modules["__main__"])), "name": __name__, "stdin": sys.stdin.read(),
}
import stage03_engine.config
seen["after"] = sorted(sys.modules)
print(json.dumps(seen))
"""


def both(run: Any) -> list[Any]:
    """What `run` returns without a fork, and with one."""
    counts = fork_start.counts
    with fork_start.plainly():
        plain = run()
    before = counts["forked"]
    forked = run()
    assert counts["forked"] > before, "it was not forked"
    return [plain, forked]


def seen(*words: str, code: str = SEES, **how: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **{"input": "", **how})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def beside_ours(how: dict[str, Any]) -> dict[str, Any]:
    """With the variables of `how` beside those of this process."""
    return how | {"env": os.environ | how["env"]} if how.get("env") else how


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: (value, other[name]) for name, value in one.items() if value != other[name]}


@pytest.mark.slow(keep=("environment", "input", "session", "umask"))
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"env": {"STAGES_X": "é\n=", "PROMETHEUS_MULTIPROC_DIR": "/tmp"}},
        {"cwd": "/"},
        {"input": "two\nlines, and é"},
        {"start_new_session": True},
        {"process_group": 0},
        {"umask": 0o27},
    ],
    ids=["as it is", "environment", "folder", "input", "session", "group", "umask"],
)
def test_a_forked_process_sees_itself_as_another_does(how: dict[str, Any]) -> None:
    how = beside_ours(how)
    plain, forked = both(lambda: seen("a word", "--flag", "", **how))
    assert not differences(plain, forked)


def test_it_inherits_limits_blocked_signals_and_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        with (tmp_path / "file").open("w") as file:
            plain, forked = both(lambda: seen(pass_fds=[file.fileno()]))
            number = file.fileno()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR1, handler)
    assert not differences(plain, forked)
    assert signal.SIGTERM in forked["blocked"] and number in forked["descriptors"]


ENDS = {
    "returns": "print('out'); import sys; print('err', file=sys.stderr)",
    "exit code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('that is wrong')",
    "error": "def f(): raise ValueError('é')\nf()",
    "hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('hook', kind, trace.tb_lineno)\n1 / 0",
    "syntax": "1 +",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nsignal.pause()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "import os; os.abort()",
    "at the end": "import atexit; atexit.register(print, 'last'); print('bytes', end='')",
    "left open": "file = open(1, 'w', closefd=False); file.write('not flushed')",
    "thread": "import threading, time; threading.Timer(0.05, print, ['from a thread']).start(); print('main')",
    "closed pipe": "import os, sys; os.close(1); print('x')",
    "no module": "import stage03_engine.no_such_module",
    "torch": "import torch, numpy; print(torch.ones(3) @ torch.ones(3), torch.get_num_threads(), numpy.ones(2))",
    "imports": "import sys, stage02_server.api_server; print(*sorted({name.partition('.')[0] for name in sys.modules}))",
    "hidden": "import importlib, sys, os; print(hasattr(importlib, 'metadata'), 'torch' in sys.modules, hasattr(os, 'torch'))",
}  # fmt: skip


@pytest.mark.slow(keep=("message", "error", "Ctrl-C", "killed", "at the end", "left open", "hidden"))
@pytest.mark.parametrize("case", ENDS)
def test_it_writes_and_ends_as_another_does(case: str, tmp_path: Path) -> None:
    def run() -> Any:
        done = subprocess.run([sys.executable, "-c", ENDS[case]], capture_output=True, cwd=tmp_path, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr

    plain, forked = both(run)
    assert forked == plain


@pytest.mark.slow(keep="words2")
@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["serve", "gpt2-tiny", "--port", "x"], []])
def test_a_module_runs_as_another_does(words: list[str]) -> None:
    def run() -> Any:
        done = subprocess.run([sys.executable, "-m", "stage02_server", *words], capture_output=True, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr

    plain, forked = both(run)
    assert forked == plain


def test_a_file_runs_as_another_does(tmp_path: Path) -> None:
    script, more = tmp_path / "script.py", tmp_path / "more"
    script.write_text(
        "import beside, sys; print(__file__, __name__, sys.argv, sys.path, beside.X, sorted(vars()))\n1 / 0"
    )
    more.mkdir()
    (more / "beside.py").write_text("X = 5")
    environment = {**os.environ, "PYTHONPATH": f"{more}:/no/such/folder:{more}"}

    def run() -> Any:
        command = [sys.executable, "-u", str(script), "word"]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment)
        return done.returncode, done.stdout, done.stderr

    plain, forked = both(run)
    assert forked == plain


@pytest.mark.slow(keep="torch.py")
@pytest.mark.parametrize("name", ["sitecustomize.py", "torch.py", "numpy"])
def test_a_folder_with_a_module_of_a_librarys_name_comes_first(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    before = fork_start.counts["forked"]
    for how in ({"cwd": tmp_path}, {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}}):
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=PATIENCE, **how)
    assert fork_start.counts["forked"] == before


SHOWS = """
import json, os, pathlib, sys
ours = sorted(name for name in sys.modules if name.partition(".")[0] in {packages})
seen = {{name: [module.__file__, module.__spec__.origin, type(module.__spec__.loader).__name__] for name in ours if (module := sys.modules[name]).__spec__}}
found = sorted(name for name, module in sys.modules.items() if getattr(module, "__spec__", None))  # Cython makes some without
fresh = len(getattr(sys.meta_path[0], "_kept", [None]))
pathlib.Path(os.environ["SHOWN"]).write_text(json.dumps([seen, found, sorted(stagetrace.vocabulary.VOCABULARY), fresh]))
"""
"""Of a middleware's file, which a server imports when all else is imported: what the process has loaded."""


def shown(tmp_path: Path, **variables: str) -> Any:
    """What a server has loaded whose own middleware cannot be used."""
    (tmp_path / "mine.py").write_text("import stagetrace.vocabulary\n" + SHOWS.format(packages=sorted(PACKAGES)))
    paths = os.pathsep.join([str(tmp_path), str(fork_start.ROOT), str(fork_start.ROOT / "trace")])
    environment = os.environ | {"PYTHONPATH": paths, "SHOWN": str(tmp_path / "shown")} | variables
    command = [sys.executable, "-m", "stage02_server", "serve", "gpt2-tiny", "--engine", "echo", "--port", "0"]
    done = subprocess.run([*command, "--middleware", "mine.No"], env=environment, capture_output=True, text=True, timeout=PATIENCE)  # fmt: skip
    assert done.returncode, done.stderr
    return json.loads((tmp_path / "shown").read_text())


def test_a_server_has_loaded_what_it_imports(tmp_path: Path) -> None:
    """Of the project, too, which a fork server has loaded: the same modules, from the same files."""
    (*plain, _), (*forked, fresh) = both(lambda: shown(tmp_path))
    for one, other in zip(plain, forked):
        assert {*one} ^ {*other} == set() and one == other
    assert fresh == 0, "it imported the project afresh"


def test_a_variable_that_the_project_reads_at_its_import_makes_it_import_afresh(tmp_path: Path) -> None:
    *_, fresh = shown(tmp_path, STAGES_PLUGINS="")
    assert fresh > 100


@pytest.mark.parametrize("which", ["cwd", "PYTHONPATH"])
def test_another_copy_of_the_project_is_taken_where_it_comes_first(which: str, tmp_path: Path) -> None:
    (tmp_path / "stage02_server").mkdir()
    (tmp_path / "stage02_server/__init__.py").touch()
    (tmp_path / "stage02_server/__main__.py").write_text("import sys\nprint('another', *sys.argv[1:])")
    how: dict[str, Any] = {"cwd": tmp_path}
    if which == "PYTHONPATH":
        how = {"env": {**os.environ, "PYTHONPATH": f"{tmp_path}:{fork_start.ROOT}"}, "cwd": "/"}

    def run() -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "stage02_server", "x"], capture_output=True, text=True, timeout=PATIENCE, **how
        )
        return done.returncode, done.stdout, done.stderr

    assert both(run) == [(0, "another x\n", "")] * 2


def test_what_an_installed_package_adds_is_found(tmp_path: Path) -> None:
    """An entry point of a folder that comes first."""
    (tmp_path / "theirs.py").touch()
    information = tmp_path / "theirs-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[vllm_in_stages.features]\ntheirs = theirs:NO_SUCH_NAME\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{fork_start.ROOT}:{fork_start.ROOT / 'trace'}",
    }

    def run() -> Any:
        command = [sys.executable, "-m", "stage02_server", "serve", "gpt2-tiny", "--port", "x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        return done.returncode, done.stdout, done.stderr

    plain, forked = both(run)
    assert forked == plain and "theirs" in plain[2]


def test_its_random_numbers_are_its_own() -> None:
    code = "import json, random, numpy, torch, uuid\nprint(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(), str(uuid.uuid4())]))"
    first, second = seen(code=code), seen(code=code)
    assert all(one != other for one, other in zip(first, second))


def test_it_is_found_by_its_command_line_and_is_a_child() -> None:
    command = [sys.executable, "-c", "input()", "a word"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        [child] = [each for each in psutil.Process().children() if each.pid == process.pid]
        wait_until(lambda: child.cmdline()[:4] == command, "it does not show its command line")
        assert child.name() == Path(os.path.realpath(sys.executable)).name or child.name() == Path(sys.executable).name
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == -signal.SIGTERM
    assert not psutil.pid_exists(process.pid)


@pytest.mark.slow(keep=("hashes", "bare", "open descriptors", "code before"))
@pytest.mark.parametrize(
    "how",
    [
        {"env": {"OMP_NUM_THREADS": "2"}},
        {"env": {"PYTHONHASHSEED": "1"}},
        {"env": {"TRITON_INTERPRET": "0"}},
        {"env": {"HF_HUB_OFFLINE": "0"}},
        {"env": {fork_start.OFF: "0"}},
        {"env": {}},
        {"close_fds": False},
        {"preexec_fn": lambda: None},
    ],
    ids=["threads", "hashes", "Triton", "hub", "switched off", "bare", "open descriptors", "code before"],
)
def test_what_would_make_a_difference_is_not_forked(how: dict[str, Any]) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True, timeout=PATIENCE)
    before = fork_start.counts["forked"]
    assert before, "nothing is forked at all"
    subprocess.run([sys.executable, "-c", ""], check=True, timeout=PATIENCE, **beside_ours(how))
    subprocess.run([sys.executable, "-S", "-c", ""], check=True, timeout=PATIENCE)
    subprocess.run(["true"], check=True, timeout=PATIENCE)
    assert fork_start.counts["forked"] == before


def test_a_server_and_its_engine_are_forked_and_nothing_is_left() -> None:
    server = ServerProcess("gpt2-tiny", "--port", "0")
    try:
        server.wait_until_ready()
        api = psutil.Process(server.process.pid)
        [engine] = api.children()
        assert engine.ppid() == api.pid
        assert " ".join(engine.cmdline()).startswith("stages::EngineCore_DP0 -m stage03_engine.core ipc://")
        family = fork_start.all_children(api, recursive=True)
        assert len(family) > 1  # its fork server too
        api.terminate()
        assert server.wait() == 0
        psutil.wait_procs(family, timeout=PATIENCE)
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family)
        assert server.process.stdout is not None and " torch " not in server.process.stdout.read()
    finally:
        server.close()


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
print(child.pid, flush=True)
child.wait()
"""


def test_an_orphan_that_comes_while_a_process_is_forked_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment this process adopts orphans. One whose parent ends then is nobody's `Popen`, and would stay as a zombie."""
    pipe = subprocess.PIPE
    with fork_start.plainly():
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    orphan = int(parent.stdout.readline())
    born, age = fork_start.born_at(orphan), 2 * fork_start.TICK
    wait_until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > born + age, "older than what is forked from now on")
    way = fork_start.server()
    assert way is not None

    class Link:
        sendmsg = way.link.sendmsg

        def recv(self, size: int) -> bytes:
            parent.kill()
            parent.wait()
            return link.recv(size)

    link = way.link
    monkeypatch.setattr(way, "link", Link())
    both(lambda: None if fork_start._blocks else subprocess.run([sys.executable, "-c", ""], check=True))
    assert psutil.Process(orphan).ppid() == os.getpid(), "it never came here, and so this shows nothing"
    parent.stdin.close()
    parent.stdout.close()
    wait_until(lambda: not psutil.pid_exists(orphan), "the orphan stays")
