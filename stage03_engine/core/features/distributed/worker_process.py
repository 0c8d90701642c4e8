"""`python -m stage03_engine.core.features.distributed.worker_process ADDRESS RANK LANE`: a worker as a process of its own.

Started by MultiprocExecutor, or on another machine by machines/node.py, not by hand. It ends when its standard input closes, which comes even after kill -9 of the executor.
Source: vllm/v1/executor/multiproc_executor.py (WorkerProc).
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from stagetrace import trace

if TYPE_CHECKING:
    import zmq

    from stage03_engine.core.features.distributed.rank_worker import RankWorker

FLUSH_MS = 50
LINGER_MS = 1000  # for the last message of a worker that ends
IPC = "ipc://"


def _watch_parent(address: str) -> None:
    """os._exit, because the main thread may be deep in a forward pass, or wait for a worker that is dead."""
    while os.read(0, 4096):
        pass
    trace.close()
    if address.startswith(IPC):
        shutil.rmtree(Path(address.removeprefix(IPC)).parent, ignore_errors=True)
    os._exit(0)


def run_worker(address: str, rank: int, lane: str) -> int:
    """Main function of the worker process; returns its exit code."""
    threading.Thread(target=_watch_parent, args=(address,), name="parent-watch", daemon=True).start()
    trace.hold(lane)
    socket = _connect(address, rank)
    # From here on modules are imported that take seconds: the watch has begun before.
    from stage03_engine.core.features.distributed.parallel_state import ExchangeError
    from stage03_engine.core.features.distributed.worker_messages import FAILED, encode, failure_of
    from stage03_engine.errors import StagesError
    from stage03_engine.tracing import trace_message

    try:
        _serve(socket, _start(socket, rank, lane))
    except Exception as error:
        if trace.on:
            trace.emit("worker.failed", message=trace_message(error))
        if not isinstance(error, StagesError | ExchangeError):
            sys.excepthook(type(error), error, error.__traceback__)  # nobody expected it: the log gets the traceback
        socket.send_multipart([FAILED, encode(failure_of(error))])
        return 1
    finally:
        socket.context.destroy(linger=LINGER_MS)
        trace.close()
    return 0


def _connect(address: str, rank: int) -> zmq.Socket:
    import zmq

    name = b"worker%d" % rank
    if not address.startswith(IPC):
        from stage03_engine.core.features.distributed.machines.addresses import secret_of_worker
        from stage03_engine.nodes.secure_sockets import Connection, read_secret

        return Connection(zmq.Context(), zmq.DEALER, address, read_secret(secret_of_worker()), name).socket
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def _start(socket: zmq.Socket, rank: int, lane: str) -> RankWorker:
    """hello -> init -> loaded. Trace events are held until the configuration arrives."""
    import gc
    import time

    from stage03_engine.args.log import enter_process
    from stage03_engine.core.features.distributed.rank_worker import RankWorker
    from stage03_engine.core.features.distributed.worker_messages import (
        CALL,
        WorkerHello,
        WorkerInit,
        decode_call,
        encode,
    )
    from stage03_engine.tracing import open_trace

    cause = trace.emit("worker.hello", rank=rank) if trace.on else None
    socket.send_multipart([CALL, encode(WorkerHello(os.getpid(), time.monotonic_ns(), cause))])
    _, payload, *_ = socket.recv_multipart()
    init = decode_call(payload)
    assert isinstance(init, WorkerInit)
    open_trace(init.config, run_id=init.run_id)
    enter_process(lane, init.config)
    worker = RankWorker(init)
    gc.collect()
    gc.freeze()  # the model and the modules live as long as the process: the collector need not scan them again
    if trace.on:
        trace.emit("worker.ready", rank=rank, cause=init.cause)
    socket.send_multipart([CALL, encode(worker.loaded())])
    return worker


def _serve(socket: zmq.Socket, worker: RankWorker) -> None:
    """Steps and calls in the order in which they come, until the executor asks for the end."""
    from stage03_engine.core.features.distributed.worker_messages import (
        CALL,
        SHUTDOWN,
        STEP,
        WorkerCall,
        decode_call,
        encode,
    )

    while True:
        if trace.on and not socket.poll(FLUSH_MS):
            trace.flush()
        kind, payload, *rest = socket.recv_multipart()
        if kind == STEP:
            answer = worker.step(payload, rest[0])
            if answer is not None:
                socket.send_multipart([STEP, *answer])
            continue
        call = decode_call(payload)
        assert isinstance(call, WorkerCall)
        if trace.on and call.method == SHUTDOWN:
            trace.emit("worker.stopped")
        socket.send_multipart([CALL, encode(worker.call(call))])
        if call.method == SHUTDOWN:
            return


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
