"""Of the policy."""

from __future__ import annotations

from broken import broken

_SCHEDULE = "        output = super().schedule()\n"
_IMPORT = "from collections import Counter\n"
_CLASS = "class Scheduler(Mechanics):\n"
_IMPATIENT = "            if request.num_preemptions or self.step - self.since[request.request_id] > PATIENCE:\n"
_FIRST = "                return 0, request.arrival\n"
_KEY = "            return 1, self.given[client_of(request)], request.arrival\n"
_SORTED = "        return sorted(waiting, key=key)\n"
_RUNNING = "        return sorted(running, key=lambda request: request.arrival)\n"
_WHOSE = '    return request.cache_salt or ""\n'
_ROOM = "        if len(self.running) > 0 and self.kv_cache_manager.block_pool.num_free < 2 * len(self.running):\n"
_CONFIG = "        super().__init__(*args)  # type: ignore[arg-type]\n"
_GIVEN = "        self.given = Counter[str]()  # tokens per client that is here\n"
_WAITING = "    def waiting_order(self, waiting: list[Request]) -> list[Request]:\n"
_END = '            self._trace_held_back("blocks", budget)\n        else:\n            super()._schedule_waiting(output, budget)\n'


def _by(key: str) -> tuple[str, str]:
    """The patient ones wait in another order."""
    return _KEY, f"            return {key}\n"


def _fcfs(*changes: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Nothing is left of the policy: both orders are those of arrival, and blocks are taken as they come."""
    return (_by("0, request.arrival"), (_ROOM, "        if False:\n"), *changes)


BROKEN = [
    broken(
        "same",
        "time is up",
        (_IMPORT, _IMPORT + "from time import monotonic\n"),
        (
            _IMPATIENT,
            "            self.clock.setdefault(request.request_id, monotonic())\n            if request.num_preemptions or monotonic() - self.clock[request.request_id] > 60:\n",
        ),
        (_GIVEN, _GIVEN + "        self.clock: dict[str, float] = {}\n"),
    ),
    broken(
        "same",
        "the time of day",
        (_IMPORT, _IMPORT + "import time\n"),
        _by("1, int(time.time()) % 7 * request.arrival % 5, request.arrival"),
    ),
    broken(
        "same",
        "a lottery",
        (_IMPORT, _IMPORT + "from random import Random\n"),
        (_CLASS, "LOTS = Random(1)\n\n\n" + _CLASS),
        _by("1, LOTS.randrange(100), request.arrival"),
    ),
    broken(
        "same",
        "every scheduler has the same account",
        (_CLASS, _CLASS + "    all_given = Counter[str]()\n"),
        (_GIVEN, "        self.given = self.all_given\n"),
        (
            "        self.given = Counter({each: max(self.given[each], floor) for each in here})\n",
            "        self.given.update({each: max(0, floor - self.given[each]) for each in here})\n",
        ),
    ),
    broken("same", "where requests lie in memory", _by("1, id(request) // 16 % 1009")),
    broken(
        "same",
        "a default that is filled",
        (
            _WAITING,
            "    def waiting_order(self, waiting: list[Request], seen: list[str] = []) -> list[Request]:  # noqa: B006\n        seen += [each.request_id for each in waiting]\n",
        ),
        _by("1, len(seen) % 5 * request.arrival % 7, request.arrival"),
    ),
    broken(
        "orders",
        "only whose turn it is",
        (
            _SORTED,
            "        found = sorted(waiting, key=key)\n        return [each for each in found if client_of(each) == client_of(found[0])]\n",
        ),
    ),
    broken("orders", "no list", (_SORTED, "        return tuple(sorted(waiting, key=key))\n")),
    broken(
        "orders", "sorted in place", (_RUNNING, "        return running.sort(key=lambda request: request.arrival)\n")
    ),
    broken(
        "orders",
        "one twice",
        (_SORTED, "        found = sorted(waiting, key=key)\n        return found[:1] + found\n"),
        (
            "self.waiting[:] = self.waiting_order(list(self.waiting))",
            "self.waiting[:] = dict.fromkeys(self.waiting_order(list(self.waiting)))",
        ),
    ),
    broken(
        "orders",
        "who has waited too long is left out",
        (_SORTED, "        return sorted([each for each in waiting if not each.num_preemptions], key=key)\n"),
        (
            "self.waiting[:] = self.waiting_order(list(self.waiting))",
            "found = self.waiting_order(list(self.waiting))\n        self.waiting[:] = [each for each in self.waiting if each not in found] + found",
        ),
    ),
    broken(
        "budget",
        "twice as many",
        (_IMPORT, _IMPORT + "from dataclasses import replace\n"),
        (
            _CONFIG,
            _CONFIG
            + "        self.config = replace(self.config, max_num_batched_tokens=2 * self.config.max_num_batched_tokens)\n",
        ),
    ),
    broken(
        "budget",
        "one of its own for the waiting",
        (
            "super()._schedule_waiting(output, budget)",
            "super()._schedule_waiting(output, self.config.max_num_batched_tokens)",
        ),
    ),
    broken(
        "budget",
        "one more where it is used up",
        ("super()._schedule_waiting(output, budget)", "super()._schedule_waiting(output, max(1, budget))"),
    ),
    broken(
        "seats",
        "one more",
        (_IMPORT, _IMPORT + "from dataclasses import replace\n"),
        (_CONFIG, _CONFIG + "        self.config = replace(self.config, max_num_seqs=1 + self.config.max_num_seqs)\n"),
    ),
    broken(
        "seats",
        "for each client",
        (_IMPORT, _IMPORT + "from dataclasses import replace\n"),
        (
            _SCHEDULE,
            "        seats, config = len({client_of(each) for each in self.requests.values()}), self.config\n        self.config = replace(config, max_num_seqs=max(1, seats) * config.max_num_seqs)\n"
            + _SCHEDULE
            + "        self.config = config\n",
        ),
    ),
    broken(
        "seats",
        "as long as there are blocks",
        (_IMPORT, _IMPORT + "from dataclasses import replace\n"),
        (_CONFIG, _CONFIG + "        self.config = replace(self.config, max_num_seqs=1000)\n"),
    ),
    broken(
        "blocks",
        "tokens are kept after a preemption",
        (
            _END,
            _END
            + "\n    def _preempt(self, request: Request, output: SchedulerOutput, needed_by: Request) -> None:\n        computed = request.num_computed_tokens\n        super()._preempt(request, output, needed_by)\n        request.num_computed_tokens = computed\n\n    def _known_tokens(self, request: Request, num_hits: int) -> int:\n        return request.num_computed_tokens\n",
        ),
    ),
    broken(
        "blocks",
        "a block for whoever goes first",
        (
            _SCHEDULE,
            _SCHEDULE
            + "        if self.step == 2 and (pool := self.kv_cache_manager.block_pool).num_free:\n            pool.allocate(1)\n",
        ),
    ),
    broken(
        "ends",
        "the longest answer must fit",
        (
            _ROOM,
            "        blocks = self.kv_cache_manager.block_pool.num_free * self.kv_cache_manager.block_size\n        if self.waiting and blocks < self.waiting[0].num_tokens + (self.waiting[0].sampling_params.max_tokens or 0):\n",
        ),
    ),
    broken(
        "ends",
        "two blocks must always be free",
        (
            _ROOM,
            "        if self.kv_cache_manager.block_pool.num_free < 2 + -(-self.waiting[0].num_tokens // 4) if self.waiting else True:\n",
        ),
    ),
    broken(
        "ends",
        "who was preempted waits for everybody",
        (_ROOM, "        if self.waiting and self.waiting[0].num_preemptions > 1:\n"),
    ),
    broken(
        "starves", "the newest", _by("1, -request.arrival"), (_IMPATIENT, "            if request.num_preemptions:\n")
    ),
    broken(
        "starves",
        "the shortest",
        _by("1, request.num_tokens, request.arrival"),
        (_IMPATIENT, "            if request.num_preemptions:\n"),
    ),
    broken(
        "starves",
        "who has had most",
        _by("1, -self.given[client_of(request)], request.arrival"),
        (_IMPATIENT, "            if request.num_preemptions:\n"),
    ),
    broken(
        "starves",
        "patience without end",
        ("PATIENCE = 120", "PATIENCE = 4000"),
        _by("1, request.num_prompt_tokens, request.arrival"),
    ),
    broken("as_good", "three at a time", (_ROOM, "        if len(self.running) >= 3:\n")),
    broken("as_good", "one at a time", (_ROOM, "        if self.running:\n")),
    broken(
        "as_good",
        "those with most tokens",
        _by("1, -self.given[client_of(request)], request.arrival"),
        (_ROOM, "        if len(self.running) > 4:\n"),
    ),
    broken("better", "in the order of arrival", *_fcfs()),
    broken(
        "better",
        "who was sent away goes first",
        *_fcfs(
            (_FIRST, "                return -1, request.arrival\n"),
            (_IMPATIENT, "            if request.num_preemptions:\n"),
        ),
    ),
    broken(
        "better",
        "half a turn",
        *_fcfs(
            (
                _SORTED,
                "        return sorted(waiting, key=lambda request: request.arrival // 2 * 2 + client_of(request).count('a') % 1)\n",
            )
        ),
    ),
    broken(
        "hidden",
        "chat goes first",
        (_WHOSE, "    return '' if request.cache_salt in ('chat', 'agent') else 'all'\n"),
        _by("1, client_of(request), request.arrival"),
        (_ROOM, "        if False:\n"),
    ),
    broken(
        "hidden",
        "batch goes last",
        (_WHOSE, "    return request.cache_salt or ''\n"),
        _by("1, client_of(request) == 'batch', request.arrival"),
        (_ROOM, "        if False:\n"),
    ),
    broken(
        "hidden",
        "by the words of the ids",
        _by('1, request.request_id.startswith("cmpl-batch"), request.arrival'),
        (_ROOM, "        if False:\n"),
    ),
    broken(
        "hidden",
        "by the letters of the names",
        _by('1, sum(client_of(request).encode()) == sum(b"batch"), request.arrival'),
        (_ROOM, "        if False:\n"),
    ),
    broken(
        "promised",
        "by the tokens of the agent",
        _by('1, request.num_prompt_tokens > 16 and request.all_token_ids[0] != 100 + sum(b"agent"), request.arrival'),
        (_ROOM, "        if False:\n"),
    ),
    broken(
        "promised",
        "turns by the words of the id",
        _by('1, self.given[client_of(request)], request.request_id.rpartition("-")[0], request.arrival'),
    ),
    broken("promised", "equals by their names", _by("1, self.given[client_of(request)], request.request_id")),
    broken(
        "promised",
        "by the first token",
        _by("1, self.given[client_of(request)], request.all_token_ids[0], request.arrival"),
    ),
    broken("promised", "by the seed", _by("1, self.given[client_of(request)], request.seed, -request.arrival")),
    broken(
        "promised",
        "greedy ones last",
        _by(
            "1, self.given[client_of(request)] + (9 if request.sampling_params.temperature < 1 else 0) * request.arrival, request.arrival"
        ),
    ),
]
