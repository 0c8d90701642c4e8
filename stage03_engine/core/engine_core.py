"""The inner loop of the engine: schedule -> execute -> update (vllm/v1/engine/core.py, EngineCore)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.hooks import install
from stage03_engine.core.kv_cache_size import decide_num_blocks
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.core.worker import Executor
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from stage03_engine.plugins import find, wanted
from stagetrace import trace


class EngineCore:
    """Scheduler and executor of one model. Lives in the engine process, or in-process below `LLM`."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.executor = Executor.get_class(config)(config)
        try:
            self.num_gpu_blocks = decide_num_blocks(config, self.executor)
            self.executor.initialize_kv_cache(self.num_gpu_blocks)
            self.scheduler = self._make_scheduler()
        except BaseException:
            self.executor.shutdown()  # or its workers would go on without an engine
            raise
        self.observers: list[Callable[[EngineCoreOutputs], None]] = []  # see each step's outputs before they are sent
        # Seeds for requests that bring none: the same engine seed and order of arrival give the same outputs.
        self._seeds = random.Random(config.model_config.seed)

    def _make_scheduler(self) -> Scheduler:
        """The scheduler with its block pool, or the classes that --scheduler-cls and --block-pool-cls name."""
        cache, scheduling, max_len = self.config.cache_config, self.config.scheduler_config, self.config.max_model_len
        seed = cache.prefix_caching_hash_seed
        hash_seed = os.urandom(32) if seed is None else seed.encode()
        if cache.block_pool_cls is None and scheduling.scheduler_cls is None:
            scheduler = Scheduler(scheduling, cache, BlockPool(self.num_gpu_blocks), max_len, hash_seed)
        else:
            make_scheduler = wanted("engine", "own_scheduler", "a scheduler or a block pool of your own")
            scheduler = make_scheduler(self.config, self.num_gpu_blocks, hash_seed)
        install(self.config.hooks("scheduler"), scheduler, self.config)
        if trace.on:
            trace.emit(
                "scheduler.created", max_num_seqs=scheduling.max_num_seqs, max_model_len=max_len,
                max_num_batched_tokens=scheduling.max_num_batched_tokens, num_blocks=self.num_gpu_blocks,
                num_swap_blocks=sum(hook.num_cpu_blocks for hook in scheduler.hooks),
                scheduler_config=asdict(scheduling), cache_config=asdict(replace(cache, prefix_caching_hash_seed=None)),
            )  # fmt: skip
        return scheduler

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError if its id is in use, InvalidRequestError if it cannot be served."""
        params = message.sampling_params
        install(params.hooks("scheduler"), self.scheduler, self.config)
        request = Request(message, self._seeds.getrandbits(63) if params.seed is None else params.seed)
        request.queued_at = time.monotonic()
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once and free their blocks; unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids)

    @property
    def has_unfinished_requests(self) -> bool:
        """Does `step` have anything to do?"""
        return self.scheduler.has_unfinished_requests

    def step(self) -> EngineCoreOutputs:
        """Run one step: schedule, execute, update. If no request can run, only the statistics are returned."""
        ended, can_run = self._poll_hooks()
        if not can_run or not self.scheduler.has_unfinished_requests:
            return self._observed(EngineCoreOutputs(ended, self.scheduler.make_stats()))
        scheduler_output = self._begin()
        return self._end(scheduler_output, self.executor.execute_model(scheduler_output), ended)

    def _begin(self) -> SchedulerOutput:
        """The first part of a step: the decision. The executor is called next."""
        if trace.on:
            step, running, waiting = self.scheduler.step + 1, len(self.scheduler.running), self.scheduler.num_waiting
            trace.emit("engine.step", ph="B", step=step, running=running, waiting=waiting)
        output = self.scheduler.schedule()
        self._note_queue_times(output)
        if trace.on:
            trace.emit("executor.execute", ph="B", step=output.step, num_reqs=len(output.num_scheduled_tokens))
        return output

    def _end(self, output: SchedulerOutput, ran: ModelRunnerOutput, ended: list[EngineCoreOutput]) -> EngineCoreOutputs:
        """The last part of a step: the executor has returned. The outputs in `ended` go first."""
        if trace.on:
            trace.emit("executor.execute", ph="E", step=output.step, num_reqs=len(ran.sampled_token_ids))
        outputs = self.scheduler.update_from_output(output, ran)
        if trace.on:
            running, waiting = len(self.scheduler.running), self.scheduler.num_waiting
            trace.emit("engine.step", ph="E", step=output.step, running=running, waiting=waiting)
        return self._observed(EngineCoreOutputs(ended + outputs, self.scheduler.make_stats(), step=output.step))

    def _poll_hooks(self) -> tuple[list[EngineCoreOutput], bool]:
        """The last outputs of requests that hooks ended since the last step; and whether any request can run."""
        ended, ready = list[EngineCoreOutput](), list[bool | None]()
        for hook in self.scheduler.hooks:
            outputs, can_run = hook.poll()
            ended += outputs
            ready.append(can_run)
        return ended, True in ready or False not in ready

    def _note_queue_times(self, scheduler_output: SchedulerOutput) -> None:
        """How long a request waited to be first scheduled; its first output reports it. (The scheduler has no clock.)"""
        for new in scheduler_output.scheduled_new_reqs:
            request = self.scheduler.requests[new.request_id]
            if request.queued_at is not None:  # None: it resumes
                request.queued_seconds, request.queued_at = time.monotonic() - request.queued_at, None

    def _observed(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        for observe in self.observers:
            observe(outputs)
        return outputs

    def call(self, method: str, *args: Any) -> Any:
        """Call a feature's function by name. False if it is unknown, not installed, or did nothing. Raises InvalidRequestError if it refuses."""
        function = find("call", method)
        return False if function is None else function(self, *args)

    def on_failure(self, report: Callable[[str], None]) -> None:
        """From now on `report(why)` is called, from any thread, when a worker has died."""
        self.executor.on_failure(report)

    def shutdown(self) -> None:
        """Release the hooks and the executor."""
        for hook in self.scheduler.hooks:
            hook.shutdown()
        self.executor.shutdown()
