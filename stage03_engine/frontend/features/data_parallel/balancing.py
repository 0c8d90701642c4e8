"""Which engine a request goes to: the least busy one, or the one that has cached the longest prefix of its prompt.

Source: vllm/v1/engine/core_client.py (DPLBAsyncMPClient.get_core_engine_for_request). Routing by prefix is what vLLM leaves to
routers in front of several servers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from stage03_engine.messages import EngineCoreRequest

WAITING_WEIGHT = 4
"""A waiting request counts as much as four running ones: a request that joins a queue waits for all before it."""
MOST_BEHIND = 16
"""An engine whose score is further above the lowest than this is too busy for its cached prefix to count."""


@dataclass
class EngineLoad:
    """How busy an engine is, as far as this front end knows."""

    waiting: int = 0
    running: int = 0

    @property
    def score(self) -> int:
        """The lower it is, the sooner a new request runs."""
        return self.waiting * WAITING_WEIGHT + self.running

    def sent(self) -> None:
        """One more request is on its way."""
        self.waiting += 1

    def seen(self, waiting: int, running: int, own: int) -> None:
        """The scheduler's counts after a step, without what is still on its way. `own`: how many of this front end's requests the engine
        has, those included."""
        self.waiting, self.running = max(waiting, own - running), running


class PrefixIndex:
    """What the engines should have in their prefix caches, judging by the prompts that were sent to them.

    A hash stands for all tokens up to the end of its block. Python's own hash will do: a collision would only send a request to a worse
    engine. The index forgets hashes in the order in which a cache evicts blocks: least recently used first, the end of a prompt
    before its beginning.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._capacity: dict[int, int] = {}
        self._known: dict[int, OrderedDict[int, None]] = {}

    def join(self, engine: int, num_blocks: int) -> None:
        """A new engine, with an empty cache of this many blocks."""
        self._capacity[engine], self._known[engine] = max(1, num_blocks), OrderedDict()

    def leave(self, engine: int) -> None:
        """The engine takes no more requests."""
        self._known.pop(engine, None)

    def reset(self) -> None:
        """All caches are empty again."""
        for known in self._known.values():
            known.clear()

    def hashes(self, request: EngineCoreRequest) -> list[int]:
        """A hash for each full block of the prompt."""
        tokens, size = request.prompt_token_ids, self._block_size
        made, parent = list[int](), hash(request.cache_salt)
        for start in range(0, len(tokens) - size + 1, size):
            parent = hash((parent, *tokens[start : start + size]))
            made.append(parent)
        return made

    def num_known(self, engine: int, hashes: list[int]) -> int:
        """How many of the first blocks the engine should have cached."""
        known = self._known[engine]
        return next((count for count, each in enumerate(hashes) if each not in known), len(hashes))

    def add(self, engine: int, hashes: list[int]) -> None:
        """The engine gets a prompt with these blocks."""
        known = self._known[engine]
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._capacity[engine]:
            known.popitem(last=False)


@dataclass(frozen=True)
class Choice:
    """The engine for a request, and how many blocks of its prompt should be cached there."""

    engine: int
    cached_blocks: int = 0


class Balancer:
    """Knows how busy each engine is that takes requests, and with `prefixes` what it has cached."""

    def __init__(self, prefixes: PrefixIndex | None = None) -> None:
        self.loads: dict[int, EngineLoad] = {}
        self._prefixes = prefixes

    def join(self, engine: int, num_blocks: int) -> None:
        """This idle engine takes requests from now on."""
        self.loads[engine] = EngineLoad()
        if self._prefixes is not None:
            self._prefixes.join(engine, num_blocks)

    def leave(self, engine: int) -> None:
        """The engine takes no more requests. May be called twice."""
        self.loads.pop(engine, None)
        if self._prefixes is not None:
            self._prefixes.leave(engine)

    def caches_are_empty(self) -> None:
        """All prefix caches have been reset."""
        if self._prefixes is not None:
            self._prefixes.reset()

    def choose(self, request: EngineCoreRequest) -> Choice | None:
        """Choose the engine for this request, and count the request there. None if no engine is ready. Ties go to the lowest number."""
        if not self.loads:
            return None
        choice = Choice(min(sorted(self.loads), key=self._score))
        if self._prefixes is not None:
            hashes = self._prefixes.hashes(request)
            choice = self._with_prefix(self._prefixes, hashes, choice)
            self._prefixes.add(choice.engine, hashes)
        self.loads[choice.engine].sent()
        return choice

    def _with_prefix(self, prefixes: PrefixIndex, hashes: list[int], idlest: Choice) -> Choice:
        most = self._score(idlest.engine) + MOST_BEHIND
        near: Iterable[int] = (engine for engine in sorted(self.loads) if self._score(engine) <= most)
        known = {engine: prefixes.num_known(engine, hashes) for engine in near}
        best = max(known, key=lambda engine: (known[engine], -self._score(engine)))
        return Choice(best, known[best]) if known[best] else idlest

    def _score(self, engine: int) -> int:
        return self.loads[engine].score
