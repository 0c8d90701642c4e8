"""What must hold of the scheduler: of a request before it is queued, and of its whole state after a step. No torch.

vLLM has no counterpart of the second: `--check-invariants` asks for it, and every test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.request import Request
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from stage03_engine.core.scheduler import Scheduler


def check_fits(scheduler: Scheduler, request: Request) -> None:
    """Refuse what would wait for ever: it may grow beyond the whole cache. (At start-up the default pool is made large
    enough for one request of full length; a block pool of the user's own may be smaller.) Raises InvalidRequestError."""
    max_tokens = request.sampling_params.max_tokens or scheduler.max_model_len
    num_tokens = min(request.num_prompt_tokens + max_tokens, scheduler.max_model_len)
    needed = cdiv(num_tokens, scheduler.kv_cache_manager.block_size)
    usable = scheduler.kv_cache_manager.block_pool.num_usable
    if needed > usable:
        raise InvalidRequestError(
            f"The request may grow to {num_tokens} tokens, which take {needed} KV-cache blocks, but there are only {usable}.",
            "max_tokens",
        )


def check_queues_and_slots(scheduler: Scheduler) -> None:
    """Every request is in one queue, once, and every computed token has a slot. Raises AssertionError."""
    running, waiting = {r.request_id for r in scheduler.running}, {r.request_id for r in scheduler.waiting}
    if scheduler.swap_space is not None:
        scheduler.swap_space.check_invariants(waiting)
    assert len(running) == len(scheduler.running), "a request is queued twice"
    assert len(waiting) == len(scheduler.waiting), "a request is queued twice"
    assert not running & waiting, "a request both runs and waits"
    assert running | waiting == set(scheduler.requests), "a request is lost"
    manager = scheduler.kv_cache_manager
    for request in scheduler.running:
        held = len(manager.block_table(request.request_id)) * manager.block_size
        assert request.num_computed_tokens <= held, "a token has no slot"
