"""Misconception: a request that does not fit is passed over, so that no block stays unused."""

from __future__ import annotations

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "the first that does not fit holds back all after it"


class Scheduler(Reference):
    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        for request in self.waiting.in_turn():
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            hits = self.kv_cache_manager.get_computed_blocks(request)
            computed = max(len(hits) * self.kv_cache_manager.block_size, request.num_computed_tokens)
            missing = request.num_tokens - computed
            if not self.config.enable_chunked_prefill and missing > budget:
                continue
            num_tokens = self._limited(missing, budget)
            new_blocks = self.kv_cache_manager.allocate_slots(request, computed + num_tokens, hits)
            if new_blocks is None:
                continue
            self._admit(request, computed, hits, new_blocks, output)
            budget = self._give(request, num_tokens, new_blocks, output, budget)
