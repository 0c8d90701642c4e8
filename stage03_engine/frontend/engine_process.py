"""Start the engine process, shake hands with it, notice its death, and clean up.

The engine is a plain subprocess (`python -m stage03_engine.core`), not a multiprocessing child: it receives its configuration
over the handshake socket as msgpack, so nothing is ever pickled, and a user's main module is not imported again.
Source: vllm/v1/engine/utils.py (CoreEngineProcManager, launch_core_engines, wait_for_engine_startup).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from stage03_engine import messages
from stage03_engine.args.command import WAITING, signals_are_ours
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineStartError
from stage03_engine.messages import EngineFailed, EngineHello, EngineInit, EngineReady
from stage03_engine.mixins import is_there, load
from stagetrace import trace

POLL_MS = 50
TERMINATE_SECONDS = 5.0
HELLO_SECONDS = 600.0  # for an engine process to import its modules and say hello (vLLM: VLLM_ENGINE_READY_TIMEOUT_S); loading may take any time
PREFIX = "stages-"
LOCKED_FOLDER = "stage03_engine.frontend.features.dead_folders:claim_folder"
MAX_IPC_PATH = 80  # a Unix socket path has room for 107 bytes; leave some for the file name


def base_folder() -> str:
    """Where the socket folders go: the temporary folder, unless its name is too long for a socket's path."""
    base = tempfile.gettempdir()
    return "/tmp" if len(base) > MAX_IPC_PATH - 20 else base


class SocketFolder:
    """A folder that only this user may enter: access to a socket is control over the engine."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base_folder()))  # mkdtemp makes it with mode 0700

    def remove(self) -> None:
        """Call it once the sockets are closed. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)


def engine_environment(num_threads: int, attention_backend: str = "auto") -> dict[str, str]:
    """Environment of the engine process. Triton reads from it whether to interpret kernels, and OpenMP how its threads wait, when
    they are loaded: so both are set before the process exists. What the user has set stays."""
    threads = str(num_threads)
    waiting = {} if any(name in os.environ for name in WAITING) else WAITING
    interpret = {"TRITON_INTERPRET": "1"} if attention_backend == "triton-interpret" else {}
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **waiting, **interpret}


class EngineProcess:
    """One engine process and the private directory of its sockets."""

    def __init__(self, config: VllmConfig, engine_index: int = 0) -> None:
        self._config = config
        locks = is_there(LOCKED_FOLDER.partition(":")[0])
        self._folder: SocketFolder = load(LOCKED_FOLDER)() if locks else SocketFolder()
        self._directory = self._folder.path
        self.handshake_address = f"ipc://{self._directory}/handshake"
        self.input_address = f"ipc://{self._directory}/input"
        self.output_address = f"ipc://{self._directory}/output"
        self.identity = engine_index.to_bytes(2, "little")
        self._context = zmq.Context()
        self._handshake = self._context.socket(zmq.ROUTER)
        self._handshake.bind(self.handshake_address)
        command = [sys.executable, "-m", "stage03_engine.core", self.handshake_address, str(engine_index)]
        # Standard input is how the engine is asked to end, and notices our death: the pipe closes even on kill -9.
        device = config.device_config
        environment = engine_environment(device.num_threads or 1, device.attention_backend)
        with signals_are_ours():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=environment)
        if trace.on:
            trace.emit("engine.spawned", pid=self._process.pid)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def shake_hands(self) -> EngineReady:
        """hello -> init -> ready. Blocks while the engine loads the model. Raises EngineStartError when it does not come up."""
        try:
            hello = self._receive(HELLO_SECONDS)
            assert isinstance(hello, EngineHello)
            init = EngineInit(self._config, self.input_address, self.output_address, trace.run_id)
            if trace.on:
                offset = time.monotonic_ns() - hello.monotonic_ns
                init.cause = trace.emit("engine.init_sent", cause=hello.cause, clock_offset_ns=offset)
            self._handshake.send_multipart([self.identity, messages.encode(init)])
            answer = self._receive()
        finally:
            self._handshake.close(linger=0)
        if isinstance(answer, EngineFailed):
            raise EngineStartError(answer.message)
        assert isinstance(answer, EngineReady)
        return answer

    def _receive(self, limit: float = math.inf) -> EngineHello | EngineInit | EngineReady | EngineFailed:
        deadline = time.monotonic() + limit
        while not self._handshake.poll(POLL_MS):
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"the engine process said nothing for {limit:.0f} s; is {self._directory} still there?"
                )
            if not self.alive and not self._handshake.poll(POLL_MS):
                code = self._process.returncode
                why = " (killed, as a system does that runs out of memory)" if code == -signal.SIGKILL else ""
                raise EngineStartError(f"the engine process ended during start-up with exit code {code}{why}")
        _, payload = self._handshake.recv_multipart()
        return messages.decode_handshake(payload)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread as soon as the process has ended (vLLM: engine monitor thread)."""

        def wait() -> None:
            callback(self._process.wait())

        threading.Thread(target=wait, name="engine-monitor", daemon=True).start()

    def shutdown(self) -> None:
        """End the process, reap it, and remove the sockets. May be called twice."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already, or this is the second call
            pipe.write(b"\n")
        try:
            self._process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        pipe.close()
        self._handshake.close(linger=0)
        self._context.term()
        self._folder.remove()
