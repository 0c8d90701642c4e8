"""A scheduling policy of your own: who waits for whom, and who gives its blocks back.

Open-ended. Write the two orders; whatever else of Scheduler you override is up to you, as long as its rules hold.
"""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics


def client_of(request: Request) -> str:
    """Given: whose request this is. With several API keys the server salts the prefix cache with one salt per key, so that
    is what tells in the core who asks."""
    return request.cache_salt or ""


class Scheduler(Mechanics):
    """Decides as the reference does, but both queues stand in your order.

    What you may look at:
    request.arrival               its number in the order of arrival
    request.num_prompt_tokens     and num_output_tokens so far; num_tokens is their sum
    request.num_computed_tokens   how many of them are in the KV cache; after a preemption 0
    request.sampling_params       max_tokens: the answer may be this long, but most end earlier, and nobody knows when
    request.num_preemptions       how often it was sent away
    request.priority              what its client asked for; a smaller number is more urgent
    client_of(request)            whose it is; all that the name says is who is the same
    self.requests                 all requests by id; self.step counts the steps; self.config holds budget and seats
    self.kv_cache_manager.block_pool.num_free

    What you may not use: clocks, random numbers, files, or anything that outlives this object.
    """

    def schedule(self) -> SchedulerOutput:
        """Given: put both queues into your orders, then decide as usual. What the step gave to whom stands in
        output.num_scheduled_tokens (request id -> tokens), should you want to count it."""
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        output = super().schedule()
        return output

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        """The same requests in the order in which they are to be admitted. The first that finds no seat, budget or
        blocks holds back all after it. Preempted requests are among them."""
        raise NotImplementedError

    def running_order(self, running: list[Request]) -> list[Request]:
        """The same requests in the order in which they get tokens. When blocks are missing, the last one gives its own
        back, and computes its tokens again later."""
        raise NotImplementedError
