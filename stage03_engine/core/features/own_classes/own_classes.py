"""The user's own scheduler and block pool: `--scheduler-cls`, `--block-pool-cls` (vLLM has the first). No torch."""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.features.own_classes.construct import construct
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import InvalidRequestError


def make_scheduler(config: VllmConfig, num_blocks: int, hash_seed: bytes) -> Scheduler:
    """The classes that the flags name, the reference ones for the rest. Raises ConfigError for one that cannot be made."""
    cache, scheduling = config.cache_config, config.scheduler_config
    pool = BlockPool(num_blocks)
    if cache.block_pool_cls is not None:
        pool = construct(cache.block_pool_cls, "--block-pool-cls", num_blocks)
    arguments = (scheduling, cache, pool, config.max_model_len, hash_seed)
    if scheduling.scheduler_cls is None:
        scheduler = Scheduler(*arguments)
    else:
        scheduler = construct(scheduling.scheduler_cls, "--scheduler-cls", *arguments)
    if cache.block_pool_cls is not None:
        scheduler.hooks.append(PoolSizeHook(scheduler, config))
    return scheduler


class PoolSizeHook(SchedulerHook):
    """The reference pool has room for at least one request of full length; a user's own pool may be smaller."""

    def added(self, request: Request) -> None:
        """Refuse a request that may outgrow the whole cache: it would never run."""
        manager, max_model_len = self.scheduler.kv_cache_manager, self.scheduler.max_model_len
        max_tokens = request.sampling_params.max_tokens or max_model_len
        num_tokens = min(request.num_prompt_tokens + max_tokens, max_model_len)
        needed, usable = cdiv(num_tokens, manager.block_size), manager.block_pool.num_usable
        if needed > usable:
            raise InvalidRequestError(
                f"The request may grow to {num_tokens} tokens, which take {needed} KV-cache blocks, but there are only "
                f"{usable}.",
                "max_tokens",
            )
