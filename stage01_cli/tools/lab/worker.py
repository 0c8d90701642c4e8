"""The process that simulates for the server: one JSON object per line in, one per line out.

A scheduler of the learner's own may loop, print or end its process. So it runs here and never in the server: what it prints is kept
apart from the answers, and a simulation may use so many seconds of CPU time and no more. It is told so by an exception, which names
its line; if it catches that and goes on, or waits for something, its process ends. A class that was written into the page is shut in besides, as the
grader does it with strangers, or is not run: it writes no file, starts no process and reaches no network.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from stage01_cli.tools.lab.own_scheduler import OwnScheduler, TookTooLong
from stage01_cli.tools.lab.simulate import simulate
from stage03_engine.mixins import is_there

MAX_MEMORY_BYTES = 4 << 30
GRACE_CPU_SECONDS = 1.0  # from the exception to the end of the process
WALL_SECONDS = 30.0  # for one that waits and uses no CPU time
WHOLE_LIFE_CPU_SECONDS = 3600  # of a process that is shut in; a new one follows it
SANDBOX = "stage01_cli.tools.course.sandbox"


def main(limit: float, path: str | None, is_shut_in: bool = False) -> int:
    """Answer until standard input closes. `path`: the learner's class; a question says whether it is meant, or brings the code of another."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a class writes past sys.stdout is no answer
    if sys.platform == "linux":  # macOS refuses a limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))

    if is_shut_in:
        _shut_in()
    this = os.getpid()
    for line in sys.stdin.buffer:
        question = json.loads(line)
        own = OwnScheduler(path) if path is not None and question["own"] else None
        if (code := question.get("code")) is not None:
            own = OwnScheduler(text=code)
        answer = _simulate(question["scenario"], own, limit)
        if os.getpid() != this:  # a copy that the class made with fork(): one of us answers
            os._exit(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
    return 0


def _shut_in() -> None:
    """The grader's sandbox. The folder is one in which nothing can be written. Raises ImportError or OSError where there is no sandbox: then nothing runs."""
    import_module(SANDBOX).shut_in(Path(os.devnull), WHOLE_LIFE_CPU_SECONDS, MAX_MEMORY_BYTES // 4)


def sandbox_problem() -> str | None:
    """Why no code can be shut in here, or None."""
    if not is_there(SANDBOX):
        return f"{SANDBOX} is not installed"
    problem: str | None = import_module(SANDBOX).problem()
    return problem


def _simulate(scenario: Any, own: OwnScheduler | None, limit: float) -> dict[str, Any]:
    told = False

    def stop(*_: Any) -> NoReturn:
        nonlocal told
        if told:
            os._exit(1)
        told = True
        raise TookTooLong(f"it was still at work after {limit:g} seconds of CPU time")

    signal.signal(signal.SIGPROF, stop)
    faulthandler.dump_traceback_later(WALL_SECONDS, exit=True, file=sys.stderr)
    signal.setitimer(signal.ITIMER_PROF, limit, GRACE_CPU_SECONDS)
    try:
        return simulate(scenario, own)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    words = [word for word in sys.argv[2:] if word != "--shut-in"]
    raise SystemExit(main(float(sys.argv[1]), words[0] if words else None, "--shut-in" in sys.argv))
