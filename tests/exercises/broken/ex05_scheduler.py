"""Of the scheduler."""

from __future__ import annotations

from broken import broken

_LIMIT = "        return num_tokens if num_tokens < budget else budget\n"
_THRESHOLD = "        if 0 < threshold < num_tokens and len(self.requests) > 1:\n            num_tokens = threshold\n"
_SEATS = "            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:\n"
_RULE = '                rule = "budget" if budget <= 0 else "max_num_seqs"\n'
_COUNT = "            self.requests[request_id].num_computed_tokens += num_tokens\n"
_NO_NEWCOMER = (
    "        if not output.preempted_req_ids:\n            self._schedule_waiting(output, budget)\n        elif"
)
_VICTIM = "            victim = self.running.pop()\n"
_FULL = '            if new_blocks is None:\n                rule = "blocks"\n                break\n'
_CHUNK = "            if not self.config.enable_chunked_prefill and missing > budget:\n"
_ITSELF = "            if new_blocks is None:  # the request itself was the last one, and was preempted\n                break\n"

BROKEN = [
    broken(
        "numbered",
        "from 0",
        (
            "        self.step += 1\n        output = SchedulerOutput(self.step,",
            "        output = SchedulerOutput(self.step,",
        ),
        (
            "        budget = self._schedule_running(",
            "        self.step += 1\n        budget = self._schedule_running(",
        ),
    ),
    broken(
        "budget",
        "each request has its own",
        (_LIMIT, "        return num_tokens\n"),
        ("        return budget - num_tokens\n", "        return max(1, budget - num_tokens)\n"),
    ),
    broken(
        "budget",
        "the waiting ones have another",
        (
            "            self._schedule_waiting(output, budget)\n",
            "            self._schedule_waiting(output, self.config.max_num_batched_tokens)\n",
        ),
    ),
    broken("seats", "one too many", (_SEATS, _SEATS.replace(">=", ">"))),
    broken("seats", "as many as come", (_SEATS, "            if budget <= 0:\n")),
    broken("counted", "one is always missing", (_COUNT, _COUNT.replace("+= num_tokens", "+= max(1, num_tokens - 1)"))),
    broken(
        "no_newcomer",
        "somebody is admitted beside",
        (
            _NO_NEWCOMER,
            "        self._schedule_waiting(output, budget)\n        if not output.preempted_req_ids:\n            pass\n        elif",
        ),
    ),
    broken(
        "preempt_last",
        "the first",
        (_VICTIM, "            victim = next(iter(self.running))\n            self.running.remove(victim)\n"),
    ),
    broken(
        "order",
        "the shortest first",
        (
            "for request in self.waiting.in_turn():",
            "for request in sorted(self.waiting.in_turn(), key=lambda each: each.num_tokens):",
        ),
    ),
    broken("order", "one that does not fit is passed over", (_FULL, _FULL.replace("break", "continue"))),
    broken("whole", "is cut as always", (_CHUNK, "            if False:\n")),
    broken("threshold", "is forgotten", (_THRESHOLD, "")),
    broken(
        "threshold",
        "one more than it allows",
        ("            num_tokens = threshold\n", "            num_tokens = threshold + 1\n"),
    ),
    broken(
        "all_missing", "also for one that is alone", (_THRESHOLD, _THRESHOLD.replace(" and len(self.requests) > 1", ""))
    ),
    broken(
        "all_missing",
        "one token each",
        (
            "            num_tokens = self._limited(request.num_tokens - request.num_computed_tokens, budget)\n",
            "            num_tokens = min(1, self._limited(request.num_tokens - request.num_computed_tokens, budget))\n",
        ),
    ),
    broken(
        "cached",
        "from the beginning",
        ("            hits = self.kv_cache_manager.get_computed_blocks(request)\n", "            hits = []\n"),
    ),
    broken(
        "cached", "without its last block", ("get_computed_blocks(request)\n", "get_computed_blocks(request)[:-1]\n")
    ),
    broken("says_why", "never", ("        if trace.on and self.num_waiting:\n", "        if False:\n")),
    broken(
        "says_why",
        "not after a preemption",
        ('            self._trace_held_back("preempted", budget)\n', "            pass\n"),
    ),
    broken("says_why", "always blocks", (_RULE, '                rule = "blocks"\n')),
    broken(
        "says_why",
        "the budget at the beginning",
        (
            "            self._trace_held_back(rule, budget)\n\n",
            "            self._trace_held_back(rule, self.config.max_num_batched_tokens)\n\n",
        ),
    ),
    broken(
        "ends",
        "a request that cannot run is tried for ever",
        (
            _ITSELF,
            _ITSELF.replace("break", "return 0"),
        ),
        (_NO_NEWCOMER, _NO_NEWCOMER.replace("if not output.preempted_req_ids:", "if not self.stats.num_preemptions:")),
    ),
    broken(
        "decisions",
        "blocks that nobody hears of",
        (
            "            output.new_block_ids[request.request_id] = new_blocks\n",
            "            if new_blocks:\n                output.new_block_ids[request.request_id] = new_blocks\n",
        ),
    ),
    broken(
        "decisions",
        "nobody hears who has ended",
        (
            "output = SchedulerOutput(self.step, [], {}, {}, self.finished_req_ids, [])",
            "output = SchedulerOutput(self.step, [], {}, {}, [], [])",
        ),
    ),
    broken(
        "decisions",
        "who has ended is told again",
        (
            "        self.finished_req_ids = []\n        for hook in self.hooks:\n            for request_id in hook.released",
            "        self.finished_req_ids = self.finished_req_ids[:]\n        for hook in self.hooks:\n            for request_id in hook.released",
        ),
    ),
]
