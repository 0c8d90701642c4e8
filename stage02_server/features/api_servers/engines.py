"""The engines behind several API servers. No server owns them: the launcher starts them, and starts again those that die.

Every server hears of each death and each start (`frontend/features/shared_engine.py`), and itself sends the requests of a dead engine
to other engines. Source: vllm/v1/engine/utils.py (CoreEngineProcManager); vLLM starts no engine again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineStartError, StagesError
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.shared_engine import EngineGone, EngineRefused, EngineStarted, EngineUp, Order
from stage03_engine.mixins import load

DATA_PARALLEL = "stage03_engine.frontend.features.data_parallel."
START_ENGINE = DATA_PARALLEL + "several_front_ends:start_engine"
COORDINATOR = DATA_PARALLEL + "coordinator:DPCoordinator"
RESTART_LIMIT = DATA_PARALLEL + "restart:RestartLimit"


class Engines:
    """One engine, whose death is the end, or several, which are started again as often as --data-parallel-restart says.

    `tell` sends an order to every server. `may_restart` is False while servers start: then an engine that dies is a failed start. `on_end`
    is called with the reason when an engine stays dead. All but `_wait` happens on the event loop.
    """

    def __init__(
        self, config: VllmConfig, tell: Callable[[Order], None], may_restart: Callable[[], bool],
        on_end: Callable[[StagesError], None],
    ) -> None:  # fmt: skip
        self._config, self._tell, self._may_restart, self._on_end = config, tell, may_restart, on_end
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, EngineProcess] = {}
        self._limit: Any = None  # a RestartLimit, with several engines
        self._coordinator: Any = None  # a DPCoordinator, with several engines
        self._up: dict[int, EngineUp] = {}  # engines that have loaded their model
        self._is_closed = False

    def start(self, count: int) -> None:
        """Start the processes. Raises OSError, and ConfigError if there are fewer GPUs than engines need."""
        if count > 1:
            self._limit = load(RESTART_LIMIT)(self._config.data_parallel_config.data_parallel_restart)
            self._coordinator = load(COORDINATOR)(self._config)
        for index in range(count):
            self._start(index)

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """Input and output address of each engine. Those of a server's own ends have its number at the end."""
        return [(engine.input_address, engine.output_address) for _, engine in sorted(self._processes.items())]

    @property
    def told(self) -> list[Order]:
        """What a server that comes later must hear: which engines are up."""
        return list(self._up.values())

    @property
    def num_restarts(self) -> int:
        """How often a dead engine has been started again."""
        return 0 if self._limit is None else self._limit.total

    @property
    def coordinator_folder(self) -> str | None:
        """Where the servers find the coordinator; None if there is none."""
        return None if self._coordinator is None else str(self._coordinator.folder)

    def _start(self, index: int, later: bool = False) -> EngineProcess:
        several = self._limit is not None
        engine = load(START_ENGINE)(self._config, index, later) if several else EngineProcess(self._config)
        self._processes[index] = engine
        threading.Thread(target=self._wait, args=(index, engine), name="handshake", daemon=True).start()
        return engine

    def _wait(self, index: int, engine: EngineProcess) -> None:
        """In a thread: the handshake, and then the end of the process."""
        try:
            ready = engine.shake_hands()
        except StagesError as error:
            return self._soon(self._refused, index, error)
        except zmq.ZMQError:
            return  # `shutdown` closed the socket
        self._soon(self._ready, EngineUp(index, ready))
        engine.on_exit(partial(self._soon, self._gone, index))

    def _soon(self, handle: Callable[..., None], *args: Any) -> None:
        """From any thread: call `handle` on the event loop."""
        with contextlib.suppress(RuntimeError):  # it is closed: all has ended
            self._loop.call_soon_threadsafe(handle, *args)

    def _ready(self, up: EngineUp) -> None:
        self._up[up.engine] = up
        self._tell(up)

    def _gone(self, index: int, exit_code: int) -> None:
        self._up.pop(index, None)
        again = self._take()
        self._tell(EngineGone(index, exit_code, again))
        self._go_on(index, again, EngineStartError(f"engine {index} ended unexpectedly (exit code {exit_code})"))

    def _refused(self, index: int, error: Exception) -> None:
        again = self._take()
        self._tell(EngineRefused(index, str(error), again))
        self._go_on(index, again, error if isinstance(error, StagesError) else EngineStartError(str(error)))

    def _take(self) -> bool:
        """May an engine be restarted now? A yes counts as a restart."""
        return self._limit is not None and not self._is_closed and self._may_restart() and self._limit.take()

    def _go_on(self, index: int, again: bool, why: StagesError) -> None:
        if self._is_closed:
            return
        if not again:
            return self._on_end(why)
        self._processes[index].shutdown()  # its process has ended: this removes its folder
        try:
            engine = self._start(index, later=True)
        except (StagesError, OSError, zmq.ZMQError) as error:  # the disk is full, for instance
            return self._refused(index, error)
        self._tell(EngineStarted(index, engine.input_address, engine.output_address))

    def end_stalled(self, index: int, input_address: str) -> None:
        """Kill an engine that no longer answers. A late report has the address of an engine that is gone already, and is ignored."""
        if (engine := self._processes[index]).input_address == input_address and engine.alive:
            os.kill(engine.pid, signal.SIGKILL)

    def shutdown(self) -> None:
        """End and reap every process. May be called twice."""
        self._is_closed = True
        for engine in self._processes.values():
            engine.shutdown()
        if self._coordinator is not None:
            self._coordinator.shutdown()
