"""One of several workers: the walk's Worker with a place among others (vllm/v1/worker/worker_base.py, WorkerWrapperBase), and what the process
does that has it alone."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace

import torch

from stage03_engine.args.log import enter_process
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.parallel_state import destroy_distributed, init_distributed, trace_step
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.worker_links import LinkToExecutor
from stage03_engine.core.features.distributed.worker_messages import (
    CALL,
    SHUTDOWN,
    STEP,
    WorkerCall,
    WorkerHello,
    WorkerInit,
    WorkerResult,
    decode_call,
    decode_step,
    encode,
)
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.worker import Worker
from stage03_engine.errors import StagesError
from stage03_engine.mixins import load
from stage03_engine.tracing import open_trace
from stagetrace import trace

FLUSH_MS = 50
RANK_CONFIG = "stage03_engine.core.features.distributed.rank_config:rank_config"


def join(mine: Ranks, init_method: str, config: VllmConfig) -> None:
    """Meet the other workers; a single one has nobody to meet. Raises StagesError if they do not come."""
    if mine.world_size == 1:
        return
    limit = config.parallel_config.distributed_timeout_seconds
    try:
        init_distributed(mine, init_method, config.device_config.device, limit)
    except (RuntimeError, ValueError, OSError) as error:
        within = "" if limit is None else f" within {limit} s (--distributed-timeout-seconds)"
        raise StagesError(f"the workers did not meet{within}: {str(error).partition(chr(10))[0]}") from error


def own_config(config: VllmConfig, mine: Ranks, num_threads: int | None) -> VllmConfig:
    """The configuration of one worker: its part of the model, its share of the machine's compute threads."""
    config = replace(config, device_config=replace(config.device_config, num_threads=num_threads))
    return config if mine.world_size == 1 else load(RANK_CONFIG)(config, mine)


class RankWorker:
    """A worker that is driven by messages. `answers`: its output is the engine's, because it is the first slice of the last stage.

    Raises ConfigError, StagesError if the others do not come, and what loading a model raises.
    """

    def __init__(self, init: WorkerInit) -> None:
        parallel = init.config.parallel_config
        mine = Ranks(init.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        if init.config.device_config.device == "cuda":
            torch.cuda.set_device(init.local_rank)
        join(mine, init.init_method, init.config)
        self.answers = mine.is_last_stage and mine.tp_rank == 0
        self.config = own_config(init.config, mine, init.num_threads)
        self.worker = self.config.chosen("worker", Worker)(self.config)
        self.worker.load_model()

    def loaded(self) -> WorkerResult:
        """The end of the handshake."""
        return WorkerResult(kv_block_bytes(self.config))

    def step(self, payload: bytes, cause: bytes) -> tuple[bytes, bytes] | None:
        """Run an encoded decision. Returns the encoded output and its trace reference; None if another worker answers."""
        output = decode_step(payload)
        if trace.on:
            trace.emit("worker.step_received", step=output.step, cause=cause.decode() or None, bytes=len(payload))
            trace_step(output.step)
        ran = self.worker.execute_model(output)
        if not self.answers:
            return None
        answer = encode(ran)
        sent = trace.emit("worker.output_sent", step=output.step, bytes=len(answer)) if trace.on else None
        return answer, (sent or "").encode()

    def call(self, call: WorkerCall) -> WorkerResult:
        """Run one of the methods that are not a step."""
        if call.method == "determine_available_memory":
            return WorkerResult(self.worker.determine_available_memory())
        if call.method == SHUTDOWN:
            self.shutdown()
        else:
            assert call.method == "initialize_kv_cache" and call.argument is not None, call.method
            self.worker.initialize_kv_cache(call.argument)
        return WorkerResult()

    def shutdown(self) -> None:
        """Leave the others, and release the memory."""
        self.worker.shutdown()
        destroy_distributed()


def start_worker(init: WorkerInit, lane: str) -> RankWorker:
    """The worker of this process, whose trace, log and name begin here. Raises as RankWorker does."""
    open_trace(init.config, run_id=init.run_id)
    enter_process(lane, init.config)
    worker = RankWorker(init)
    if trace.on:
        trace.emit("worker.ready", rank=init.rank, cause=init.cause)
    return worker


def shake_hands(link: LinkToExecutor, rank: int, lane: str) -> RankWorker:
    """hello -> init -> loaded. Trace events are held until the configuration arrives."""
    cause = trace.emit("worker.hello", rank=rank) if trace.on else None
    link.send(CALL, encode(WorkerHello(os.getpid(), time.monotonic_ns(), cause)))
    _, payload, _ = link.receive()
    init = decode_call(payload)
    assert isinstance(init, WorkerInit)
    worker = start_worker(init, lane)
    gc.collect()
    gc.freeze()  # the model and the modules live as long as the process: the collector need not scan them again
    link.send(CALL, encode(worker.loaded()))
    return worker


def serve(link: LinkToExecutor, worker: RankWorker) -> None:
    """Steps and calls in the order in which they come, until the executor asks for the end."""
    while True:
        if trace.on and not link.poll(FLUSH_MS):
            trace.flush()
        kind, payload, cause = link.receive()
        if kind == STEP:
            answer = worker.step(payload, cause)
            if answer is not None:
                link.send(STEP, *answer)
            continue
        call = decode_call(payload)
        assert isinstance(call, WorkerCall)
        if trace.on and call.method == SHUTDOWN:
            trace.emit("worker.stopped")
        link.send(CALL, encode(worker.call(call)))
        if call.method == SHUTDOWN:
            return
