"""The inner loop of the engine: schedule -> execute -> update (vllm/v1/engine/core.py, EngineCore)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from stage03_engine.args.import_class import construct
from stage03_engine.config import VllmConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.executor import UniProcExecutor
from stage03_engine.core.features.profiler.profiler import TorchProfiler
from stage03_engine.core.features.scheduler_watch import SchedulerWatch
from stage03_engine.core.features.structured_output.manager import StructuredOutputManager
from stage03_engine.core.kv_cache_size import decide_num_blocks, decide_num_swap_blocks
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from stagetrace import trace

GRAMMAR_WAIT_SECONDS = 0.02  # a request that arrives meanwhile waits so long at most


class EngineCore:
    """Scheduler and executor of one model. Lives in the engine process, or in-process below `LLM`."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.profiler = TorchProfiler(config.observability_config.profiler_dir)
        self.executor = UniProcExecutor(config)
        self.num_gpu_blocks = decide_num_blocks(config, self.executor)
        num_swap_blocks = decide_num_swap_blocks(config, self.executor)
        self.executor.initialize_kv_cache(self.num_gpu_blocks, num_swap_blocks)
        self.structured_output_manager = StructuredOutputManager(config)
        self.scheduler = self._make_scheduler(num_swap_blocks)
        self._execute: Callable[[SchedulerOutput], ModelRunnerOutput] = self.executor.execute_model
        self.watch = SchedulerWatch(self.scheduler)
        # Seeds for requests that bring none: the same engine seed and order of arrival give the same outputs.
        self._seeds = random.Random(config.model_config.seed)
        self._queued_at: dict[str, float] = {}
        self._queued_seconds: dict[str, float] = {}

    def _make_scheduler(self, num_swap_blocks: int) -> Scheduler:
        """The scheduler and the block pool, or those that the user brought."""
        cache, scheduling = self.config.cache_config, self.config.scheduler_config
        seed = cache.prefix_caching_hash_seed
        hash_seed = os.urandom(32) if seed is None else seed.encode()
        if cache.block_pool_cls is None:
            pool = BlockPool(self.num_gpu_blocks)
        else:
            pool = construct(cache.block_pool_cls, "--block-pool-cls", self.num_gpu_blocks)
        max_len, structured = self.config.max_model_len, self.structured_output_manager
        if trace.on:
            trace.emit(
                "scheduler.created", max_num_seqs=scheduling.max_num_seqs, max_model_len=max_len,
                max_num_batched_tokens=scheduling.max_num_batched_tokens, num_blocks=self.num_gpu_blocks,
                num_swap_blocks=num_swap_blocks, scheduler_config=asdict(scheduling),
                cache_config=asdict(replace(cache, prefix_caching_hash_seed=None)),
            )  # fmt: skip
        arguments = (scheduling, cache, pool, max_len, num_swap_blocks, hash_seed, structured)
        if scheduling.scheduler_cls is None:
            return Scheduler(*arguments)
        return construct(scheduling.scheduler_cls, "--scheduler-cls", *arguments)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError when its id is in use."""
        seed = message.sampling_params.seed
        self.scheduler.add_request(Request(message, self._seeds.getrandbits(63) if seed is None else seed))
        self._queued_at[message.request_id] = time.monotonic()

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once and free their blocks; unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids)
        for request_id in request_ids:
            self._queued_at.pop(request_id, None)
            self._queued_seconds.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        """Is there anything for `step` to do?"""
        return self.scheduler.has_unfinished_requests

    def step(self) -> EngineCoreOutputs:
        """Run one step. With nothing to do it returns the statistics alone, and what a watcher has not seen yet."""
        outputs = self._step()
        outputs.trace_events = self.watch.take()
        return outputs

    def _step(self) -> EngineCoreOutputs:
        if not self.scheduler.has_unfinished_requests:
            return EngineCoreOutputs(scheduler_stats=self.scheduler.make_stats())
        refused = self._end_refused()
        if self.structured_output_manager.num_not_ready == len(self.scheduler.requests):  # nobody can run: do not spin
            self.structured_output_manager.wait(GRAMMAR_WAIT_SECONDS)
            return EngineCoreOutputs(refused, self.scheduler.make_stats())
        if trace.on:
            step, running, waiting = self.scheduler.step + 1, len(self.scheduler.running), len(self.scheduler.waiting)
            trace.emit("engine.step", ph="B", step=step, running=running, waiting=waiting)
        scheduler_output = self.scheduler.schedule()
        for new in scheduler_output.scheduled_new_reqs:
            if new.request_id in self._queued_at:  # absent when the request resumes
                self._queued_seconds[new.request_id] = time.monotonic() - self._queued_at.pop(new.request_id)
        runner_output = self._execute(scheduler_output)
        outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        self._add_queue_time(outputs)
        if self.config.scheduler_config.check_invariants:
            self.scheduler.check_invariants()
        if trace.on:
            running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
            trace.emit("engine.step", ph="E", step=scheduler_output.step, running=running, waiting=waiting)
        return EngineCoreOutputs(refused + outputs, self.scheduler.make_stats(), step=scheduler_output.step)

    def _end_refused(self) -> list[EngineCoreOutput]:
        """End the requests whose grammar turned out to be impossible."""
        refused = [r for r in self.structured_output_manager.poll() if r.request_id in self.scheduler.requests]
        self.scheduler.finish_requests([r.request_id for r in refused], FinishReason.ERROR)
        for refusal in refused:
            self._queued_at.pop(refusal.request_id, None)
        return refused

    def _add_queue_time(self, outputs: list[EngineCoreOutput]) -> None:
        """A request's first output says how long it had waited for its first step."""
        for output in outputs:
            output.queued_seconds = self._queued_seconds.pop(output.request_id, None)

    def call(self, method: str) -> bool:
        """Call a method that is not part of serving requests, by its name; False if it did nothing."""
        return getattr(self, method)()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while a request holds blocks."""
        return self.scheduler.reset_prefix_cache()

    def start_profile(self) -> bool:
        """Begin to record what torch does; False when it is being recorded already, or there is no folder for it."""
        return self.profiler.start(self.scheduler.step)

    def stop_profile(self) -> bool:
        """Write the profile; False when there is none to write."""
        return self.profiler.stop(self.scheduler.step)

    def watch_scheduler(self) -> bool:
        """From now on the outputs of each step carry the scheduler's events, the state as it is now first."""
        return self.watch.start()

    def unwatch_scheduler(self) -> bool:
        """Nobody watches any more."""
        return self.watch.stop()

    def shutdown(self) -> None:
        """Release the executor and the grammar processes."""
        self.structured_output_manager.shutdown()
        self.executor.shutdown()
