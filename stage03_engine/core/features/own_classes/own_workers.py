"""The user's own executor and worker: `--distributed-executor-backend module:Class`, `--worker-cls` (vLLM: Executor.get_class,
WorkerWrapperBase.init_worker)."""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.own_classes.construct import construct, import_class
from stage03_engine.core.worker import Executor, UniProcExecutor, Worker
from stage03_engine.errors import ConfigError
from stagetrace import trace

BACKEND, WORKER = "--distributed-executor-backend", "--worker-cls"
STEPS = ("begin_step", "finish_step")


def make_executor(config: VllmConfig) -> Executor:
    """The executor that the flag names. Raises ConfigError for one that cannot be made, or cannot run these workers."""
    parallel = config.parallel_config
    path = parallel.distributed_executor_backend
    found = import_class(path, BACKEND, Executor)
    if parallel.world_size > 1 and issubclass(found, UniProcExecutor):
        raise ConfigError(
            f"{BACKEND} {path}: this is one worker, and tensor_parallel_size x pipeline_parallel_size is {parallel.world_size}"
        )
    lacking = [name for name in STEPS if not hasattr(found, name)]
    if lacking and parallel.pipeline_parallel_size > 1:
        raise ConfigError(f"{BACKEND} {path}: pipeline_parallel_size > 1 needs its methods {' and '.join(lacking)}")
    if trace.on:
        trace.emit("own_class.chosen", flag=BACKEND, path=path)
    executor: Executor = construct(path, BACKEND, config)
    return executor


def make_worker(config: VllmConfig) -> Worker:
    """The worker that the flag names. Raises ConfigError for one that cannot be made."""
    path = config.device_config.worker_cls
    if trace.on:
        trace.emit("own_class.chosen", flag=WORKER, path=path)
    worker: Worker = construct(path, WORKER, config, base=Worker)
    return worker
