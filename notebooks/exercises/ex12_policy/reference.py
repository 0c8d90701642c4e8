"""One policy that beats fcfs in all three measures. There are many others; do not read on before you have one."""

from __future__ import annotations

from collections import Counter

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics

PATIENCE = 120  # steps


def client_of(request: Request) -> str:
    """Whose request this is."""
    return request.cache_salt or ""


class Scheduler(Mechanics):
    """The client that had fewest tokens so far goes first; who has waited for long goes before everybody; and nobody is
    admitted into the last free blocks, because those who run will need them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.given = Counter[str]()  # tokens per client that is here
        self.since: dict[str, int] = {}  # request -> the first step in which it was seen waiting

    def schedule(self) -> SchedulerOutput:
        """Order, decide, count."""
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        output = super().schedule()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.given[client_of(self.requests[request_id])] += num_tokens
        return output

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        """The impatient by arrival; then whoever was preempted, then by what the client had so far."""
        self.since = {each.request_id: self.since.get(each.request_id, self.step) for each in waiting}
        self._join(waiting)

        def key(request: Request) -> tuple[int, ...]:
            if request.num_preemptions or self.step - self.since[request.request_id] > PATIENCE:
                return 0, request.arrival
            return 1, self.given[client_of(request)], request.arrival

        return sorted(waiting, key=key)

    def _join(self, waiting: list[Request]) -> None:
        """A client that comes, or comes back, begins with what the least served of the others had: nobody saves up."""
        here = {client_of(each) for each in self.requests.values()}
        floor = min((self.given[each] for each in here if each in self.given), default=0)
        self.given = Counter({each: max(self.given[each], floor) for each in here})

    def running_order(self, running: list[Request]) -> list[Request]:
        """By arrival: the first of all is never sent away, so something always comes to its end."""
        return sorted(running, key=lambda request: request.arrival)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        if len(self.running) > 0 and self.kv_cache_manager.block_pool.num_free < 2 * len(self.running):
            self._trace_held_back("blocks", budget)
        else:
            super()._schedule_waiting(output, budget)
