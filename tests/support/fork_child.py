"""What a fork server does, and how a process that it forks becomes the one that was asked for.

The server has one thread and has computed nothing, so what it forks is whole. A forked process is made as the system would have made it:
descriptors, environment, folder, signals, limits, session; then it runs what its command line says as Python would.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import importlib
import io
import marshal
import os
import resource
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

import fork_image
import fork_start

OURS = str(fork_start.FOLDER / "fork_")  # how the names of these files begin
ROOM = 64  # descriptors in one message
PR_SET_NAME = 15  # of prctl(2)
EVERY = signal.valid_signals()


class CommandLine:
    """Where the system keeps the command line of this process, for `ps` and whoever else asks."""

    def __init__(self) -> None:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self._start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), which counts from 1
        self._size = end - self._start

    def show(self, command: list[str]) -> None:
        """Show this one. Code that is too long is cut off."""
        line = b"".join(os.fsencode(word) + b"\0" for word in command)
        ctypes.memmove(self._start, line[: self._size - 1].ljust(self._size, b"\0"), self._size)
        fork_start.libc.prctl(PR_SET_NAME, os.fsencode(os.path.basename(command[0])), 0, 0, 0)


class Link:
    """One end of the way between a process and its fork server."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next request, and the descriptors for it. Ends this process if nobody will ever ask again."""
        size = socket.CMSG_SPACE(ROOM * array.array("i").itemsize)
        try:
            message, rights, _, _ = self.end.recvmsg(fork_start.MAX_MESSAGE, size)
        except ConnectionResetError:
            message = b""
        if not message:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in rights:
            descriptors.frombytes(data)
        return marshal.loads(message), [*descriptors]

    def answer(self, pid: int) -> None:
        self.end.send(str(pid).encode())


class Birth:
    """What a forked process has in common with its fork server until the one that asked is its parent."""

    def __init__(self) -> None:
        self._told, self._tell = os.pipe()
        self._go, self._start = os.pipe()

    def in_child(self) -> None:
        os.close(self._start)

    def finish(self) -> None:
        """The new process is as it shall look: wait until the process between is gone, and with it the parent that nobody knows."""
        os.write(self._tell, str(os.getpid()).encode())
        os.read(self._go, 1)

    def attend(self, between: int) -> int:
        """In the fork server: the new process's id."""
        os.close(self._tell)
        pid = int(os.read(self._told, 32))
        os.waitpid(between, 0)
        for each in (self._start, self._told, self._go):
            os.close(each)
        return pid


def fork(link: Link) -> Birth | None:
    """Fork a process, and make it a child of the one that asked for it. None in the fork server."""
    birth = Birth()
    if (between := os.fork()) == 0:
        if os.fork() != 0:
            os._exit(0)
        birth.in_child()
        return birth
    link.answer(birth.attend(between))
    return None


def serve(link: Link, image: fork_image.Image) -> tuple[Birth, dict[str, Any], list[int]]:
    """Fork for every request. Returns in the forked processes only."""
    while True:
        request, descriptors = link.receive()
        environment = decoded(request["environment"])
        alone = len(os.listdir("/proc/self/task")) == 1
        if (
            len(descriptors) != len(request["descriptors"])
            or not alone
            or not image.fits(
                environment, folders(request["command"], request["cwd"], environment), request["sets_threads"]
            )
        ):
            link.answer(0)
        elif birth := fork(link):
            return birth, request, descriptors
        for each in descriptors:
            os.close(each)


def stand_by() -> Link | None:
    """Fork a fork server for this process. Returns here, with the way to it adopted, and there, with its end of the way."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        take_descriptors([0, 1, 2, fork_start.LINK], [nothing] * 3 + [theirs.fileno()], set())
        ours.detach()
        theirs.detach()
        os.chdir("/")
        return Link(socket.socket(fileno=fork_start.LINK))
    theirs.close()
    number = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, fork_start.LINK)
    ours.close()
    fork_start.adopt(socket.socket(fileno=number))
    return None


def take_descriptors(numbers: list[int], received: list[int], kept: set[int]) -> None:
    """Give the received descriptors their numbers, and close all others but those `kept`."""
    highest = max([*numbers, *received, *kept]) + 1
    aside = [os.dup2(each, highest + place) for place, each in enumerate(received)]
    for number, each in zip(numbers, aside):
        os.dup2(each, number, inheritable=True)
    open_ones = sorted({*numbers, *kept})
    for low, high in zip([-1, *open_ones], [*open_ones, 1 << 30]):
        if low + 1 < high:  # an empty range from 0 would be every descriptor
            os.closerange(low + 1, high)


def standard_streams(command: list[str]) -> None:
    """New files for Python's three streams, as it opens them at its start."""
    through = command[1] == "-u" or bool(getattr(sys.stderr, "write_through", False))  # with PYTHONUNBUFFERED
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, name)
        buffering = 0 if through and mode == "w" else -1
        binary: Any = open(number, mode + "b", buffering, closefd=False)
        raw = binary.raw if buffering else binary
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            binary, encoding=old.encoding, errors=old.errors, newline="\n", write_through=through,
            line_buffering=not through and (number == 2 or raw.isatty()),
        )  # fmt: skip
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def signals(blocked: list[int], ignored: list[int]) -> None:
    """As in a new process: what is ignored stays so, everything else has its default. Python ignores two more, and has Ctrl-C raise."""
    for number in EVERY - {signal.SIGKILL, signal.SIGSTOP}:
        if number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def become(request: dict[str, Any], image: fork_image.Image) -> None:
    """Environment, command line and the rest of what a process gets from its parent."""
    command = request["command"]
    for name in {*os.environb} - {*request["environment"]}:
        del os.environb[name]
    os.environb.update(request["environment"])
    sys.orig_argv = command
    image.title_is(" ".join(command))
    for kind, limits in request["limits"].items():
        if resource.getrlimit(kind) != limits:
            resource.setrlimit(kind, limits)
    if os.sched_getaffinity(0) != set(request["cores"]):
        os.sched_setaffinity(0, request["cores"])
    if os.getpriority(os.PRIO_PROCESS, 0) != request["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    tempfile.tempdir = None
    image.seed()


def libraries(path: list[str]) -> list[str]:
    """Where Python finds what is installed: `path` without what PYTHONPATH and the command line add, which come first."""
    return path[path.index(next(each for each in path if each.endswith(".zip"))) :]


def decoded(environment: Mapping[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}


def extra(environment: Mapping[str, str]) -> list[str]:
    """Where PYTHONPATH has Python look first."""
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def folders(command: list[str], cwd: bytes, environment: Mapping[str, str]) -> list[str]:
    """Where a new process would look for modules before it looks at the libraries."""
    kind, what = fork_start.program_of(command)
    own = os.fsdecode(cwd) if kind else os.path.dirname(what)
    return [each for each in (own, *extra(environment)) if os.path.isdir(each)]


def program(command: list[str], path: list[str]) -> Callable[[], None]:
    """What Python does with this command line: `-c`, `-m` or a file."""
    kind, what = fork_start.program_of(command)
    main = types.ModuleType("__main__")
    vars(main).update(__loader__=BuiltinImporter, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    rest = command[command.index(what) + 1 :]
    sys.argv[:] = [kind or what, *rest]
    sys.path[:] = [{"-m": os.getcwd(), "-c": ""}.get(kind, os.path.dirname(what))]
    sys.path += dict.fromkeys([*extra(os.environ), *libraries(path)])
    if kind == "-m":

        def run() -> None:
            import runpy

            runpy._run_module_as_main(what)  # type: ignore[attr-defined]

        return run
    if kind == "-c":

        def run_text() -> None:
            if sys.version_info >= (3, 13):  # Python shows the lines of such a program too
                lines = what.splitlines(keepends=True)
                importlib.import_module("linecache").cache["<string>"] = (len(what), None, lines, "<string>")
            exec(compile(what, "<string>", "exec", dont_inherit=True), vars(main))

        return run_text
    vars(main).update(__file__=what, __cached__=None, __loader__=SourceFileLoader("__main__", what))
    with open(what, "rb") as file:
        code = file.read()
    return lambda: exec(compile(code, what, "exec", dont_inherit=True), vars(main))


def theirs_only(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of a fork server."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    return trace


def run(what: Callable[[], None]) -> None:
    """Run the program. An error that it raises is shown as if nothing had called it."""
    try:
        what()
    except SystemExit:
        raise
    except BaseException as error:
        shown, rest = sys.excepthook, theirs_only(error.__traceback__)
        sys.excepthook = lambda kind, error, _: shown(kind, error.with_traceback(rest), rest)
        raise


def main(before: set[str], imports: Callable[[], dict[str, set[str]]]) -> None:
    """`before` is what Python loads in any case; `imports` tells, at the end of the imports, who imports whom."""
    link, path, line = Link(socket.socket(fileno=int(sys.argv[1]))), sys.path[1:], CommandLine()
    signal.pthread_sigmask(signal.SIG_BLOCK, EVERY)  # what ends a group ends this process by the end of its parent
    image = fork_image.Image(before, imports)
    fork_start.hook()
    while True:
        birth, request, received = serve(link, image)
        link.end.detach()
        if request["new_session"]:
            os.setsid()
        if request["group"] >= 0:
            os.setpgid(0, request["group"])
        if request["umask"] >= 0:
            os.umask(request["umask"])
        further = None if request["leaf"] else stand_by()
        if further is None:
            break
        link = further
    line.show(request["command"])
    birth.finish()
    os.chdir(request["cwd"])
    environment = decoded(request["environment"])
    where = folders(request["command"], request["cwd"], environment)
    image.leave_out_the_project(fork_start.program_of(request["command"]), environment, where)
    take_descriptors(request["descriptors"], received, fork_start.kept())
    become(request, image)
    standard_streams(request["command"])
    signals(request["blocked"], request["ignored"])
    run(program(request["command"], path))
