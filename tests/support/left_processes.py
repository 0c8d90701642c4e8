"""What a test module started and did not reap: children of this process that run on, and those that ended and that nobody waited for.

A server that is left runs beside every test after it, and may be taken for one of theirs. A zombie is harmless until somebody counts children,
or the process table is full; in the project's own code it is a `Popen` that was forgotten.
"""

from __future__ import annotations

import gc
import shlex
import subprocess

import psutil

KNOWN = {
    "multiprocessing.resource_tracker": "started once, with the first shared memory, and ends with this process",
    "torch/_inductor/compile_worker": "torch's compiler keeps its workers for the next graph",
}
"""Part of a command line -> why such a child may stay. A fork server (`fork_start.py`) is none of `psutil`'s children here."""


def children() -> set[psutil.Process]:
    """This process's children, dead ones that it has not reaped included. Two that have the same id one after the other are told apart."""
    return {*psutil.Process().children()}


def left(before: set[psutil.Process]) -> list[str]:
    """A line for each child that was not there before: how it is, and its command."""
    if children() - before:
        gc.collect()  # the renderer of templates, for one, ends its process when nobody holds it any more
    return [line for child in sorted(children() - before, key=lambda each: each.pid) if (line := _line(child))]


def _line(child: psutil.Process) -> str:
    try:
        command, how = shlex.join(filter(None, child.cmdline())), "still runs"  # a forked one's is padded
    except psutil.ZombieProcess:
        command, how = _started_with(child.pid) or child.name(), "has ended, and nobody waited for it"
    except psutil.NoSuchProcess:  # a thread has just reaped it
        return ""
    return "" if any(known in command for known in KNOWN) else f"{child.pid} {how}: {command[:300]}"


def _started_with(pid: int) -> str:
    """The command of a child that has none any more, from whoever holds it; "" if nobody does."""
    for each in gc.get_objects():
        if issubclass(type(each), subprocess.Popen) and each.pid == pid:
            return each.args if isinstance(each.args, str) else shlex.join(map(str, each.args))
    return ""
