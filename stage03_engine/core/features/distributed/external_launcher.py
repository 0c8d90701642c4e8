"""`--distributed-executor-backend external_launcher`: torchrun started this process, and others like it
(vllm/v1/executor/uniproc_executor.py, ExecutorWithExternalLauncher).

    torchrun ─┬─ rank 0: LLM -> EngineCore -> this executor -> Worker ─┐  all_reduce
              └─ rank 1: LLM -> EngineCore -> this executor -> Worker ─┘

No decisions are sent: every process gets the same requests, and its scheduler decides the same. For that all must have the same number of
KV-cache blocks, so the smallest number counts, and the same settings, which are compared at start. Each step begins with a check that all have decided the same, because workers with
different decisions would wait for each other forever, or add up tensors that do not belong together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import reprlib
import sys
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stage03_engine.config import SECTIONS, VllmConfig
from stage03_engine.core.features.distributed.parallel_state import destroy_distributed, trace_step
from stage03_engine.core.features.distributed.rank_worker import join, own_config
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.several_workers import share_of_memory, threads_each
from stage03_engine.core.features.distributed.worker_messages import decode_output, encode
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.worker import Executor, Worker
from stage03_engine.errors import ConfigError, StagesError
from stagetrace import trace

logger = logging.getLogger(__name__)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMMAND = "stage03_engine.__main__"
OWN = {
    "model", "tokenizer", "model_path", "tokenizer_path", "download_dir", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "speculative_config", "draft_model_path", "lora_modules", "kv_transfer_config", "path",
}  # fmt: skip
"""Settings that each process may have for itself: where files are on its machine, and its memory, of which the smallest counts."""
OWN_SECTIONS = {
    "device_config", "observability_config", "parallel_config", "data_parallel_config", "front_ends", "node_config",
}  # fmt: skip
"""And those about its processor, its log and its place; `join` has compared the sizes."""


def launched(config: VllmConfig, environ: Mapping[str, str] = os.environ) -> tuple[Ranks, int]:
    """This process's place, and how many processes there are on this machine. Raises ConfigError if torchrun's variables are missing or
    make no sense."""
    parallel = config.parallel_config
    size = parallel.world_size
    if missing := [name for name in VARIABLES if not environ.get(name)]:
        raise ConfigError(
            f"distributed_executor_backend external_launcher needs the variable {missing[0]}, which torchrun sets: torchrun "
            f"--nproc-per-node {size} -m stage03_engine generate ..."
        )
    numbers = {name: environ.get(name, environ["WORLD_SIZE"]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise ConfigError(f"environment variable {name}: {text!r} is not a whole number")
    rank, world, local = map(int, numbers.values())
    if world != size:
        _fail_together(
            ConfigError(
                f"tensor_parallel_size x pipeline_parallel_size is {size}, but WORLD_SIZE is {world}: start as many processes as workers"
            ),
            environ,
        )
    if rank >= world or not 0 < local <= world:
        raise ConfigError(f"RANK {rank} or LOCAL_WORLD_SIZE {local} does not fit WORLD_SIZE {world}")
    return Ranks(rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size), local


def meeting_point(environ: Mapping[str, str] = os.environ) -> str:
    """Where the processes meet: in torchrun's store, or, started by hand or by srun, in one of ours at MASTER_ADDR alone."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    host = environ["MASTER_ADDR"]
    return f"tcp://{f'[{host}]' if ':' in host else host}:{environ['MASTER_PORT']}"


class ExecutorWithExternalLauncher(Executor):
    """One worker in this process, which is one of several."""

    def __init__(self, config: VllmConfig) -> None:
        self.ranks, local_size = launched(config)
        if config.device_config.device == "cuda":
            self._take_device(local_size)
        _warn_of_torchrun()
        join(self.ranks, meeting_point(), config)
        self.config = own_config(config, self.ranks, threads_each(config, local_size))
        self._local_size = local_size
        self._outputs: deque[ModelRunnerOutput] = deque()
        self._output_rank = self.ranks.world_size - self.ranks.tp_size
        self.worker = self.config.chosen("worker", Worker)(self.config)
        self._compare(config)
        if trace.on:
            trace.emit("executor.created", kind="ExecutorWithExternalLauncher")
        self.worker.load_model()
        _only_first_prints(self.ranks)

    def _take_device(self, local_size: int) -> None:
        count, mine = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", str(self.ranks.rank)))
        if mine >= count:
            raise ConfigError(f"{local_size} processes on this machine need as many GPUs, and torch finds {count}")
        torch.cuda.set_device(mine)

    def _agreed(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        """The largest or the smallest of all processes' numbers."""
        value = self._tensor([number])
        if self.ranks.world_size > 1:
            dist.all_reduce(value, how)
        return int(value.item())

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.worker.device)

    def kv_block_bytes(self) -> int:
        return self._agreed(kv_block_bytes(self.config), dist.ReduceOp.MAX)

    def determine_available_memory(self) -> int:
        smallest = self._agreed(self.worker.determine_available_memory(), dist.ReduceOp.MIN)
        return share_of_memory(self.config, smallest, self._local_size)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.worker.initialize_kv_cache(num_blocks)

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Run this process's part of a step. Raises StagesError if the processes have decided differently."""
        self._check(scheduler_output)
        trace_step(scheduler_output.step)
        self._outputs.append(self.worker.execute_model(scheduler_output))

    def finish_step(self) -> ModelRunnerOutput:
        """The output of the oldest step that has begun. With one stage every worker has it; otherwise the last stage sends it."""
        own = self._outputs.popleft()
        return own if self.ranks.pp_size == 1 else self._from_last_stage(own)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.begin_step(scheduler_output)
        return self.finish_step()

    def _check(self, scheduler_output: SchedulerOutput) -> None:
        if self.ranks.world_size == 1:
            return
        # A request without a seed gets one that is drawn from the engine's seed, so that is the same too.
        if self._different([encode(scheduler_output)]):
            _fail_together(
                StagesError(
                    f"step {scheduler_output.step}: the processes of the launcher have decided differently; give each the same prompts, in "
                    "the same order, and the same settings"
                )
            )

    def _different(self, values: list[bytes]) -> list[int]:
        """The places of the values that are not the same in every process; all have as many."""
        marks = [zlib.crc32(value) for value in values]
        both = self._tensor([*marks, *(-mark for mark in marks)])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        highest, lowest = both[: len(marks)], -both[len(marks) :]
        return [int(place) for place in (highest != lowest).nonzero().flatten()]

    def _compare(self, config: VllmConfig) -> None:
        """Fails if the processes have been started with different settings: tensors of two sizes, or two decisions, would come of it."""
        if self.ranks.world_size == 1:
            return
        settings = {
            each.name: getattr(section, each.name)
            for section in (getattr(config, name) for name in SECTIONS if name not in OWN_SECTIONS)
            for each in fields(section)
            if each.name not in OWN
        }
        wrong = self._different([repr(sorted(settings)).encode()])
        names = list(settings)
        different = (
            [names[place] for place in self._different([repr(settings[name]).encode() for name in names])]
            if not wrong
            else []
        )
        if wrong or different:
            said = ", ".join(
                f"{name} (rank {self.ranks.rank} has {reprlib.repr(settings[name])})" for name in different
            )
            _fail_together(
                ConfigError(
                    f"the processes of the launcher have different settings: {said or 'not the same features'}; start all with the same"
                )
            )

    def _from_last_stage(self, own: ModelRunnerOutput) -> ModelRunnerOutput:
        payload = encode(own) if self.ranks.rank == self._output_rank else b""
        size = self._tensor([len(payload)])
        dist.broadcast(size, self._output_rank)
        data = torch.frombuffer(bytearray(payload or bytes(int(size.item()))), dtype=torch.uint8).to(self.worker.device)
        dist.broadcast(data, self._output_rank)
        return decode_output(data.cpu().numpy().tobytes())

    def shutdown(self) -> None:
        self.worker.shutdown()
        destroy_distributed()


def _warn_of_torchrun(environ: Mapping[str, str] = os.environ) -> None:
    """Its ports are not ours to close: they belong to its own process, which began before this one."""
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "torchrun listens unprotected on all addresses of this machine, and whoever reaches it can run code in it; use a network that "
            "nobody else is on."
        )


def _fail_together(error: StagesError, environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Every process of the launcher fails now, and for the same reason: the first one of a machine says it, and torchrun's report at the
    end, which names the cause if a process has written it into a file, whichever process torchrun saw end first."""
    if not (report := environ.get("TORCHELASTIC_ERROR_FILE")):
        raise error
    said = {"py_callstack": f"stages: error: {error}", "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(report, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": str(error), "extraInfo": said}}, file)
    if environ.get("LOCAL_RANK", "0") == "0":
        raise error
    raise SystemExit(2)


def _only_first_prints(ranks: Ranks) -> None:
    """`python -m stage03_engine generate` prints what it generates, which is the same in every process. A user's own script may print
    what it likes."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if ranks.rank > 0 and main is not None and main.name == COMMAND:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
