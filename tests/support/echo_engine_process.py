"""`python tests/support/echo_engine_process.py HANDSHAKE_ADDRESS ENGINE_INDEX`: the echo engine in a process of its own.

It has the sockets, the handshake and the trace of the real engine process, and starts in a fraction of its time, since it needs no torch.
`PATCH`, run in a server before it starts, has it start this one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import zmq
import zmq.asyncio

from stage02_server.features.echo_engine.echo_engine import EchoCoreClient
from stage03_engine import messages
from stage03_engine.args.log import enter_process
from stage03_engine.config import VllmConfig
from stage03_engine.messages import EngineCoreRequestType, EngineFailed, EngineHello, EngineReady
from stage03_engine.tracing import open_trace
from stagetrace import trace

ROOT = Path(__file__).parents[2]
PATCH = f"""
import os, subprocess
class Popen(subprocess.Popen):
    def __init__(self, command, *args, **how):
        if list(command[1:3]) == ["-m", "stage03_engine.core"]:
            command = [command[0], {__file__!r}, *command[3:]]
            path = os.pathsep.join({[str(ROOT), str(ROOT / "trace")]!r})  # beside this file are folders called as the stages are
            how["env"] = (how.get("env") or os.environ) | dict(PYTHONPATH=path)
        super().__init__(command, *args, **how)
subprocess.Popen = Popen
"""
TOO_FEW = 2
"""`--num-gpu-blocks-override` with which it fails to start."""


class Echo(EchoCoreClient):
    def __init__(self, config: VllmConfig) -> None:
        self._config, self._tick_seconds = config, 0.005
        self._running, self._work, self._has_aborted = {}, asyncio.Event(), False


def watch_parent(folder: Path) -> None:
    while os.read(0, 4096):
        trace.close()
        os._exit(0)
    trace.close()
    os._exit(0)


async def run(address: str, index: int) -> None:
    identity, context = index.to_bytes(2, "little"), zmq.asyncio.Context()
    handshake = context.socket(zmq.DEALER)
    handshake.setsockopt(zmq.IDENTITY, identity)
    handshake.connect(address)
    trace.hold(f"EngineCore_DP{index}")
    cause = trace.emit("engine.hello", identity=index) if trace.on else None
    await handshake.send(messages.encode(EngineHello(os.getpid(), time.monotonic_ns(), cause)))
    init = messages.decode_handshake(await handshake.recv())
    open_trace(init.config, run_id=init.run_id)
    enter_process(f"EngineCore_DP{index}", init.config)
    if init.config.cache_config.num_gpu_blocks_override == TOO_FEW:
        await handshake.send(messages.encode(EngineFailed("there is no room for the KV cache")))
        return
    inputs, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    inputs.setsockopt(zmq.IDENTITY, identity)
    inputs.connect(init.input_address)
    outputs.connect(init.output_address)
    await inputs.send(b"")
    ready = EngineReady(100, init.config.max_model_len)
    if trace.on:
        ready.cause = trace.emit("engine.ready", num_blocks=100, max_model_len=ready.max_model_len)
    await handshake.send(messages.encode(ready))
    engine = Echo(init.config)
    reader = asyncio.create_task(read(inputs, engine))
    while not reader.done():
        await outputs.send(sent(await engine.get_output_async(), index))


async def read(inputs: zmq.asyncio.Socket, engine: Echo) -> None:
    while True:
        kind, payload = await inputs.recv_multipart()
        if kind == EngineCoreRequestType.ADD.value:
            request = messages.decode_add(payload)
            if trace.on:
                trace.emit("zmq.request_received", req=request.request_id, cause=request.cause, type="ADD")
            await engine.add_request_async(request)
        elif kind == EngineCoreRequestType.ABORT.value:
            await engine.abort_requests_async(messages.decode_abort(payload).request_ids)


def sent(outputs: messages.EngineCoreOutputs, index: int) -> bytes:
    outputs.engine_index = index
    if trace.on and outputs.outputs:
        outputs.cause = trace.emit("zmq.outputs_sent", step=1, num_outputs=len(outputs.outputs), bytes=0)
        trace.flush()
    return messages.encode(outputs)


if __name__ == "__main__":
    place = Path(sys.argv[1].removeprefix("ipc://")).parent
    threading.Thread(target=watch_parent, args=(place,), daemon=True).start()
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
