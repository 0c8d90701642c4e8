"""`--distributed-executor-backend ray`: a Ray actor per worker (vllm/v1/executor/ray_executor_v2.py).

Ray chooses the node, starts the processes and notices their end. All actors of an engine are in one placement group on one node
(STRICT_PACK): workers exchange tensors in every layer, and a network between them would cost more than a second GPU gains. RAY_ADDRESS
names a cluster to join. Without it, the engine starts a cluster on this machine, and ends it again.

The calls are Ray's. Arguments and results are bytes, the same msgpack that MultiprocExecutor sends. But Ray itself speaks pickle: whoever
reaches one of its ports runs code in the workers. So a cluster of the engine's own listens on the loopback interface alone, and asks for a
token; one that others have started is theirs to protect.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stage03_engine.args.processes import PREFIX, RENDEZVOUS
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.several_workers import SeveralWorkers, threads_each
from stage03_engine.core.features.distributed.worker_messages import (
    CALL,
    FAILED,
    SHUTDOWN,
    STEP,
    WorkerCall,
    WorkerDiedError,
    WorkerInit,
    WorkerResult,
    decode_answer,
    decode_call,
    decode_failed,
    encode,
    error_of,
    failure_of,
)
from stage03_engine.errors import ConfigError
from stagetrace import trace

PLACE_SECONDS = 60.0  # for a busy cluster to make room
SHUTDOWN_SECONDS = 3.0
KNOCK_SECONDS = 5.0
SHUT_IN = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what Ray does on these by itself, here too: no other machines, and so only loopback
}
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
logger = logging.getLogger(__name__)
Answer = tuple[bytes, bytes, bytes]  # kind, payload, cause


class RayWorker:
    """What runs in an actor. No method raises: errors are messages."""

    def __init__(self, lane: str) -> None:
        self._lane, self._folder = lane, ""
        self._worker: Any = None  # a RankWorker: its modules are imported once the environment is known
        trace.hold(lane)

    def make_rendezvous(self) -> str:
        """Called on rank 0: where the workers meet, all of which are on its machine."""
        self._folder = tempfile.mkdtemp(prefix=PREFIX + "ray-")
        return f"file://{self._folder}/{RENDEZVOUS}"

    def start(self, payload: bytes) -> Answer:
        """Load this worker's part of the model."""
        return self._answer(self._start, payload)

    def _start(self, payload: bytes) -> Answer:
        from stage03_engine.core.features.distributed.rank_worker import start_worker

        init = decode_call(payload)
        assert isinstance(init, WorkerInit)
        self._worker = start_worker(init, self._lane)
        return CALL, encode(self._worker.loaded()), b""

    def step(self, payload: bytes, cause: bytes) -> Answer:
        """Run a decision. The payload is empty if another worker answers."""
        return self._answer(lambda: (STEP, *(self._worker.step(payload, cause) or (b"", b""))))

    def call(self, payload: bytes) -> Answer:
        """Run a WorkerCall."""
        return self._answer(self._call, payload)

    def _call(self, payload: bytes) -> Answer:
        call = decode_call(payload)
        assert isinstance(call, WorkerCall)
        result = self._worker.call(call)
        if call.method == SHUTDOWN:
            if trace.on:
                trace.emit("worker.stopped")
            trace.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return CALL, encode(result), b""

    @staticmethod
    def _answer(run: Callable[..., Answer], *args: bytes) -> Answer:
        try:
            return run(*args)
        except Exception as error:
            return FAILED, encode(failure_of(error)), b""


class RayDistributedExecutor(SeveralWorkers):
    """Actors in a placement group."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._ray = ray = import_ray()
        self._actors: list[Any] = []
        self._group: Any = None
        self._closing = False
        self._meeting = ""
        self._own_cluster = not ray.is_initialized()
        if self._own_cluster:
            _join_cluster(ray)
        try:
            self._group = self._find_place(len(self.lanes))
            self._start_actors()
            if trace.on:
                trace.emit("executor.created", kind="RayDistributedExecutor")
            self.block_bytes = self._load(config)
        except BaseException:
            self.shutdown()
            raise

    def _find_place(self, count: int) -> Any:
        """A placement group with a CPU, and a GPU if there is one, for each worker, all on one node. Raises ConfigError."""
        ray = self._ray
        each = {"CPU": 1} | ({"GPU": 1} if self.config.device_config.device == "cuda" else {})
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(kind, 0) >= count * needed for kind, needed in each.items()) for node in nodes):
            wanted = " and ".join(f"{count * needed} {kind}" for kind, needed in each.items())
            largest = " and ".join(f"{max((node.get(kind, 0) for node in nodes), default=0):g} {kind}" for kind in each)
            raise ConfigError(
                f"the Ray cluster is too small: {count} workers on one node need {wanted}, and the largest node has {largest}"
            )
        group = ray.util.placement_group([each] * count, strategy="STRICT_PACK")
        limit = self.config.parallel_config.distributed_timeout_seconds or PLACE_SECONDS
        try:
            ray.get(group.ready(), timeout=limit)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(group)
            raise ConfigError(
                f"the Ray cluster had no room for {count} workers on one node within {limit:.0f} s"
            ) from None
        return group

    def _start_actors(self) -> None:
        ray = self._ray

        class Actor(RayWorker):
            @ray.method(concurrency_group="watch")
            def wait_for_end(self) -> None:
                """Never returns. The call fails when the actor ends, so its end is known at once, even between steps."""
                threading.Event().wait()

        gpus = 1 if self.config.device_config.device == "cuda" else 0
        kind = ray.remote(num_cpus=1, num_gpus=gpus, concurrency_groups={"watch": 1})(Actor)
        for rank, lane in enumerate(self.lanes):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            )
            self._actors.append(kind.options(scheduling_strategy=place).remote(lane))

    def _load(self, config: VllmConfig) -> list[int]:
        threads = threads_each(config, len(self._actors))
        [self._meeting] = self._get([self._actors[0].make_rendezvous.remote()])
        inits = [
            # Ray shows each worker its own GPU alone, which is then its first.
            encode(WorkerInit(config, rank, 0, threads, self._meeting, trace.run_id))
            for rank in range(len(self._actors))
        ]
        return self._values([actor.start.remote(init) for actor, init in zip(self._actors, inits)])

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        """The results, in order. Raises WorkerDiedError."""
        try:
            return self._ray.get(list(refs))
        except self._ray.exceptions.RayError as error:
            raise WorkerDiedError(
                f"a Ray worker ended unexpectedly: {str(error).strip().partition(chr(10))[0]}"
            ) from error

    def _wait(self, refs: list[Any], wanted: list[Any]) -> list[Answer]:
        """The results of `wanted`, which are among `refs`. Raises the failure of any of `refs` at once: the others may be waiting for it."""
        left, answers = list(refs), {}
        while any(ref not in answers for ref in wanted):
            [ready], left = self._ray.wait(left, num_returns=1)
            [answer] = self._get([ready])
            if answer[0] == FAILED:
                raise error_of(decode_failed(answer[1]), self.lanes[refs.index(ready)])
            answers[ready] = answer
        return [answers[ref] for ref in wanted]

    def _values(self, refs: list[Any]) -> list[int]:
        results = [decode_answer(payload) for _, payload, _ in self._wait(refs, refs)]
        return [result.value for result in results if isinstance(result, WorkerResult)]

    def call_all(self, method: str, argument: int | None = None) -> list[int]:
        payload = encode(WorkerCall(method, argument))
        return self._values([actor.call.remote(payload) for actor in self._actors])

    def send_step(self, payload: bytes, cause: bytes) -> list[Any]:
        return [actor.step.remote(payload, cause) for actor in self._actors]

    def receive_step(self, sent: list[Any]) -> tuple[bytes, bytes]:
        [(_, payload, cause)] = self._wait(sent, [sent[self._output_rank]])
        return payload, cause

    def on_failure(self, report: Callable[[str], None]) -> None:
        ends = [actor.wait_for_end.remote() for actor in self._actors]

        def watch() -> None:
            ready, _ = self._ray.wait(ends, num_returns=1)
            if not self._closing:
                lane = self.lanes[ends.index(ready[0])]
                if trace.on:
                    trace.emit("worker.dead", lane=lane, exit_code=-1)
                report(f"{lane} ended unexpectedly")

        threading.Thread(target=watch, name="watch-actors", daemon=True).start()

    def shutdown(self) -> None:
        """End the actors, and the cluster if it is ours. May be called twice."""
        if self._closing:
            return
        self._closing = True
        ray = self._ray
        if not ray.is_initialized():
            return
        payload = encode(WorkerCall(SHUTDOWN))
        refs = [actor.call.remote(payload) for actor in self._actors]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=SHUTDOWN_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if self._meeting:  # of an actor that was killed, if it was on this machine
            shutil.rmtree(Path(self._meeting.removeprefix("file://")).parent, ignore_errors=True)
        if self._own_cluster:
            ray.shutdown()


def import_ray() -> Any:
    """Ray, which reads its variables when it is imported. Raises ConfigError if a cluster of the engine's own could not be shut in."""
    known = sys.modules.get("ray")
    if os.environ.get("RAY_ADDRESS"):
        if os.environ.get("RAY_AUTH_MODE") != "token":
            logger.warning("RAY_AUTH_MODE is not token: whoever reaches a port of this Ray cluster can run code in it.")
    elif known is None or not known.is_initialized():
        for name, value in SHUT_IN.items():
            found = os.environ.get(name) if known else os.environ.setdefault(name, value)
            if found != value:
                raise ConfigError(
                    f"environment variable {name} is {found!r}, and a Ray cluster that the engine starts needs {value!r}, before anything "
                    "imports ray; RAY_ADDRESS names a cluster of your own"
                )
        if not any(map(os.environ.get, TOKENS)):
            os.environ[TOKENS[0]] = secrets.token_hex(
                32
            )  # Ray would write one into a file, for all clusters of this user
    return importlib.import_module("ray")


def _join_cluster(ray: Any) -> None:
    """The cluster that RAY_ADDRESS names, or a new one of this machine. Raises ConfigError if it does not answer."""
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _knock(address)
            ray.init(address=address, log_to_driver=True)
        else:
            ray.init(address="local", include_dashboard=False, log_to_driver=True)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:  # OSError: ConnectionError too
        where = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined" if address else "Ray cannot be started"
        raise ConfigError(f"{where}: {str(error).strip().partition(chr(10))[0]}") from error


def _knock(address: str) -> None:
    """Raises OSError if nothing listens there; Ray itself would try for minutes. It has to find `auto` and `ray://` by itself."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()
