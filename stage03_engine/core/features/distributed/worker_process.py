"""`python -m stage03_engine.core.features.distributed.worker_process HOW RANK LANE`: a worker as a process of its own. HOW is the way to the
executor: `pipe:DESCRIPTOR:FOLDER`, or on several machines `tcp://ADDRESS:PORT`.

MultiprocExecutor starts it, or machines/node.py on another machine; nobody does by hand. It ends when its standard input closes, which happens even
after kill -9 of the executor.
Source: vllm/v1/executor/multiproc_executor.py (WorkerProc).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stage03_engine.args.processes import end_with_parent
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.features.distributed.worker_links import LinkToExecutor

PIPE = "pipe:"


def run_worker(how: str, rank: int, lane: str) -> int:
    """Main function of the worker process; returns its exit code."""
    end_with_parent(Path(how.split(":", 2)[2]) if how.startswith(PIPE) else None)
    trace.hold(lane)
    link = _connect(how, rank)
    # From here on modules are imported that take seconds: the watch has begun before.
    from stage03_engine.core.features.distributed.parallel_state import ExchangeError
    from stage03_engine.core.features.distributed.rank_worker import serve, shake_hands
    from stage03_engine.core.features.distributed.worker_messages import FAILED, encode, failure_of
    from stage03_engine.errors import StagesError
    from stage03_engine.tracing import trace_message

    try:
        serve(link, shake_hands(link, rank, lane))
    except Exception as error:
        if trace.on:
            trace.emit("worker.failed", message=trace_message(error))
        if not isinstance(error, StagesError | ExchangeError):
            sys.excepthook(type(error), error, error.__traceback__)  # unexpected: the log gets the traceback
        link.send(FAILED, encode(failure_of(error)))
        return 1
    finally:
        link.close()
        trace.close()
    return 0


def _connect(how: str, rank: int) -> LinkToExecutor:
    if how.startswith(PIPE):
        from stage03_engine.core.features.distributed.worker_links import PipeToExecutor

        return PipeToExecutor(int(how.removeprefix(PIPE).partition(":")[0]))
    from stage03_engine.core.features.distributed.machines.links import RouterToExecutor

    return RouterToExecutor(how, rank)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
