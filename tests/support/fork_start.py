"""Start the processes of a test by a fork of one that has the libraries loaded, where that makes no difference but time.

`import torch` alone takes two seconds, and each server that a test starts is two processes. So `subprocess.Popen` of `python -m stage...`, in
the tests and in the processes that these start, asks a fork server (`fork_server.py`), a child of the process that asks. The new process
is a child of the one that asks too: who starts it holds an ordinary `Popen`. What cannot be forked without a difference starts as ever.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import itertools
import marshal
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

OFF = "STAGES_TESTS_FORK"
"""Set it to 0, and each process starts as a user starts it."""
# now, as tests go without the variables of whoever runs them
IS_ON = os.environ.get(OFF) != "0" and sys.platform == "linux"
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PADDING = 1024
"""Bytes that a fork server's command line has room for: that of a process which it forks stands there."""
LINK = 900
"""The lowest number for the descriptor of the way to a fork server: the numbers below stay as they are without one."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # of prctl(2)
MODULES = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "ipykernel_launcher")
LEAVES = ("stage03_engine.core.features.distributed.worker_process",)
"""Modules that start no process of Python's."""
BOUNDED = (
    "stage02_server.features.chat_template.process", "stage02_server.features.audio.process",
    "stage03_engine.core.features.structured_output.grammar_checker",
)  # fmt: skip
"""Modules that limit the memory of their process, in which the libraries of a fork server would count."""
SET_THREADS = ("stage03_engine.core", "stage03_engine.core.features.distributed.worker_process")
"""Modules that tell torch how many threads compute, and so need not have been started with OMP_NUM_THREADS."""
MAX_MESSAGE = 1 << 20
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds between two times at which the system can say that a process was started."""
AS_A_USER = {
    "test_serve.py": "memory and loaded libraries of the API process, signals at its start, the commands of the README",
    "test_server_process.py": "memory of the API process, and signals to it",
    "test_long_answers.py": "memory of the API process",
    "test_readme.py": "the commands of every README",
    "test_cli_main.py": "what each command imports, and how it ends at its start",
    "test_house.py": "what each process imports",
    "test_cli_walk.py": "a signal in the moment when a process is being started",
    "test_walk.py": "which files a request touches",
    "test_environment.py": "variables that libraries read when they are loaded",
    "test_loader.py": "memory of a process that loads weights",
    "test_soak.py": "memory over time",
    "test_faults.py": "memory maps of an engine",
    "test_orphans.py": "processes that end with their parent, stopped ones included",
    "test_group_signals.py": "signals to a whole group of processes",
    "test_engines_die.py": "processes that are killed, and what is left of them",
    "test_course_sandbox.py": "what a process is kept from",
    "test_course_grade.py": "what a process is kept from",
}
"""The test files all of whose processes start as a user starts them, and why."""

_plain: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
libc = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """The way to a fork server, for the process `owner` alone: one that it forks has none."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.owner, self.lock = link, os.getpid(), threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """The process id of a new child of this process. None if it must be started in another way."""
        message = marshal.dumps(request)
        if len(message) > MAX_MESSAGE:
            return None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with self.lock, adopting():
            before, began = own_children(), time.clock_gettime(time.CLOCK_BOOTTIME)
            self.link.sendmsg([message], rights)
            answer = self.link.recv(64)
            strangers = [each for each in own_children() - before if (born := born_at(each)) and born < began - TICK]
        for each in strangers:
            threading.Thread(target=reap, args=(each,), daemon=True).start()
        return int(answer) or None if answer else None


def own_children() -> set[int]:
    """The children of this process, by `/proc`: in a server `psutil` would be loaded before its time."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found |= {int(pid) for pid in (thread / "children").read_text().split()}
    return found


def born_at(pid: int) -> float:
    """When a process was started, in seconds since the system was; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19]) * TICK  # starttime of proc(5), which counts from 1


def reap(pid: int) -> None:
    """Wait for an orphan that came to this process while it waited for another: one whose parent ended in that moment."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Within the block, an orphan among what this process has started becomes its child (Linux)."""
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


_server: ForkServer | None = None
_first: Callable[[], ForkServer] | None = None
_blocks = 0  # of plainly()
counts = {"forked": 0, "plain": 0}
at_first: dict[str, str] = {}
"""The environment before the first test: that of the fork server."""


def adopt(link: socket.socket) -> None:
    """This process has a fork server of its own, at the other end of `link`."""
    global _server
    _server = ForkServer(link)


def kept() -> set[int]:
    """The descriptors that this process keeps for its fork server."""
    return set() if _server is None else {_server.link.fileno()}


def install() -> None:
    """From now on `subprocess` of this process forks where it can. The fork server starts with the first process."""
    global _first
    if IS_ON:
        _first = start_server
        at_first.update(os.environ)
        psutil.Process.children = children  # type: ignore[method-assign, assignment]
        hook()


def hook() -> None:
    """Put `fork_exec` where `subprocess.Popen` looks for it, which from Python 3.13 on prefers another call."""
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


all_children = psutil.Process.children


def children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    """The children of a process, without the fork servers, and what these are about to fork."""
    return [child for child in all_children(process, recursive) if not _forks(child)]


def _forks(process: psutil.Process) -> bool:
    try:
        return str(FOLDER / "fork_server.py") in process.cmdline()
    except psutil.Error:
        return False


def start_server() -> ForkServer:
    """A fork server, started as any process; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(FOLDER / "fork_server.py"), str(theirs.fileno()), "-" * PADDING]
    with plainly(), theirs:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=at_first)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ForkServer(ours)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """What this process starts in the block starts as a user starts it."""
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1


def server() -> ForkServer | None:
    """The fork server of this process."""
    global _server, _first
    if _server is None and _first is not None:
        start, _first = _first, None
        _server = start()
    return _server if _server is not None and _server.owner == os.getpid() else None


def can_be_forked(words: Sequence[str], program: Sequence[bytes], environment: dict[bytes, bytes]) -> bool:
    """Is it this Python, with no option but -u, with something of the project to run?"""
    if len(words) < 2 or words[1:] == ["-u"] or [os.fsencode(words[0])] != list(program) or words[0] != sys.executable:
        return False
    if environment.get(OFF.encode()) == b"0":
        return False
    kind, what = program_of(words)
    paths = environment.get(b"PYTHONPATH", b"").split(b":")
    if paths != [b""] and not all(map(os.path.isabs, paths)):
        return False
    if what in BOUNDED:
        return False
    if kind == "-m":
        size = sum(len(os.fsencode(word)) + 1 for word in words)
        return (what.partition(".")[0] in MODULES or what == "torch.distributed.run") and size < PADDING
    return kind == "-c" or (kind == "" and what.endswith(".py") and os.path.isabs(what) and os.path.isfile(what))


def program_of(words: Sequence[str]) -> tuple[str, str]:
    """`-m` and a module, `-c` and code, or nothing and a file, of a command line of Python's whose only other option is `-u`."""
    first, *rest = words[2:] if words[1] == "-u" else words[1:]
    if first in ("-c", "-m"):
        return first, rest[0] if rest else ""
    return ("?", "") if first.startswith("-") else ("", first)


def fork_exec(*arguments: Any) -> int:
    """In place of `_posixsubprocess.fork_exec`, with its arguments: the process id of a new child."""
    try:
        pid = None if _blocks else _forked(*arguments)
    except OSError:
        pid = None
    counts["plain" if pid is None else "forked"] += 1
    return _plain(*arguments) if pid is None else pid


def _forked(
    args: Any, program: Any, close_fds: bool, keep: Any, cwd: Any, environment: Any,
    to_stdin: int, _1: int, _2: int, from_stdout: int, _3: int, from_stderr: int, _4: int, report: int,
    restore_signals: bool, new_session: bool, group: int, gid: Any, gids: Any, uid: Any, umask: int, before: Any, *_: Any,
) -> int | None:  # fmt: skip
    words = [os.fsdecode(word) for word in args]
    variables = dict(each.split(b"=", 1) for each in (environ() if environment is None else environment))
    others = (gid, gids, uid, before)
    if not close_fds or any(each is not None for each in others) or not can_be_forked(words, program, variables):
        return None
    if cwd is not None and not (os.path.isdir(cwd) and os.access(cwd, os.X_OK)):
        return None
    way = server()
    if way is None:
        return None
    descriptors = {0: to_stdin, 1: from_stdout, 2: from_stderr} | {each: each for each in keep if each != report}
    numbers = {number: number if given == -1 else given for number, given in descriptors.items()}
    request = {
        "command": words,
        "environment": variables,
        "cwd": os.fsencode(os.getcwd() if cwd is None else cwd),
        "descriptors": [*numbers],
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
        "new_session": bool(new_session), "group": group, "umask": umask,
        "limits": {kind: resource.getrlimit(kind) for kind in LIMITS},
        "cores": sorted(os.sched_getaffinity(0)), "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "leaf": program_of(words)[1] in LEAVES, "sets_threads": program_of(words)[1] in SET_THREADS,
    }  # fmt: skip
    return way.fork(request, [*numbers.values()])


def environ() -> list[bytes]:
    """The environment as the system keeps it: readline, for one, adds variables that `os.environ` does not know."""
    values = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    return [*itertools.takewhile(bool, (values[place] or b"" for place in itertools.count()))]


LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
