"""Start the engine process, shake hands with it, notice its death, and clean up.

The engine is a plain subprocess (`python -m stage03_engine.core`), not a multiprocessing child: it receives its configuration
over the handshake socket as msgpack, so nothing is ever pickled, and a user's main module is not imported again.
Source: vllm/v1/engine/utils.py (CoreEngineProcManager, launch_core_engines, wait_for_engine_startup).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

import zmq

from stage03_engine import messages
from stage03_engine.args.processes import end_process, engine_environment, exit_reason, private_folder, start_process
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineStartError
from stage03_engine.messages import EngineFailed, EngineHello, EngineInit, EngineReady
from stagetrace import trace

POLL_MS = 50
TERMINATE_SECONDS = 5.0
HELLO_SECONDS = 600.0  # for an engine process to import its modules and say hello (vLLM: VLLM_ENGINE_READY_TIMEOUT_S); loading may take any time


class EngineProcess:
    """One engine process and the private directory of its sockets."""

    def __init__(self, config: VllmConfig, engine_index: int = 0) -> None:
        self._config = config
        self._folder = private_folder()
        self._directory = self._folder.path
        self.handshake_address = f"ipc://{self._directory}/handshake"
        self.input_address = f"ipc://{self._directory}/input"
        self.output_address = f"ipc://{self._directory}/output"
        self.identity = engine_index.to_bytes(2, "little")
        self._context = zmq.Context()
        self._handshake = self._context.socket(zmq.ROUTER)
        self._handshake.bind(self.handshake_address)
        device = config.device_config
        environment = engine_environment(device.num_threads or 1, device.attention_backend)
        place = self.handshake_address, str(engine_index)
        self._process = start_process("stage03_engine.core", *place, environment=environment)
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
                reason = exit_reason(self._process.returncode)
                raise EngineStartError(f"the engine process ended during start-up with {reason}")
        _, payload = self._handshake.recv_multipart()
        return messages.decode_handshake(payload)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread as soon as the process has ended (vLLM: engine monitor thread)."""

        threading.Thread(target=lambda: callback(self._process.wait()), name="engine-monitor", daemon=True).start()

    def shutdown(self) -> None:
        """End the process, reap it, and remove the sockets. May be called twice."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already, or this is the second call
            pipe.write(b"\n")  # asks it to end after its step
        end_process(self._process, TERMINATE_SECONDS)
        pipe.close()
        self._handshake.close(linger=0)
        self._context.term()
        self._folder.remove()
