"""The process that simulates for the server: one JSON object per line in, one per line out.

A scheduler of the learner's own may loop, print or end its process. So it runs here and never in the server: what it prints is kept
apart from the answers, and no simulation takes longer than the limit, after which the process ends by itself if need be.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

from stage01_cli.tools.lab.own_scheduler import OwnScheduler, TookTooLong
from stage01_cli.tools.lab.simulate import simulate

MAX_MEMORY_BYTES = 4 << 30


def _stop(*_: Any) -> NoReturn:
    raise TookTooLong(f"it was still at work after {_limit:g} seconds")


_limit = 0.0


def main() -> int:
    """`worker LIMIT [FILE.py:Class]`. Ends when its standard input closes."""
    global _limit
    _limit, path = float(sys.argv[1]), (sys.argv[2:] or [None])[0]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a class writes past sys.stdout is no answer
    signal.signal(signal.SIGALRM, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        own = OwnScheduler(path) if path is not None and question.get("own") else None
        answers.write(json.dumps(_simulate(question.get("scenario"), own)).encode() + b"\n")
        answers.flush()
    return 0


def _simulate(scenario: Any, own: OwnScheduler | None) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_REAL, _limit)
    faulthandler.dump_traceback_later(_limit + 1, exit=True, file=sys.stderr)  # for code that catches everything
    try:
        return simulate(scenario, own)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    raise SystemExit(main())
