"""Which engine a request goes to: the least busy one, or the one that has cached the longest prefix of its prompt.

Source: vllm/v1/engine/core_client.py (DPLBAsyncMPClient.get_core_engine_for_request). Routing by prefix is what vLLM leaves to
routers in front of several servers. What the engines have cached is in prefix_index.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stage03_engine.frontend.features.data_parallel.prefix_index import PrefixIndex
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


@dataclass(frozen=True)
class Candidate:
    """An engine that takes requests, when one comes."""

    engine: int  # its number
    waiting: int
    running: int
    cached_blocks: int = 0  # of the prompt's first blocks, those that it should have cached

    @property
    def score(self) -> int:
        """As that of its EngineLoad."""
        return self.waiting * WAITING_WEIGHT + self.running


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    """The engine that has cached most of the prompt, among those that are at most MOST_BEHIND above the lowest score. Of equals the
    least busy one, and of these the lowest number."""
    most = min(each.score for each in candidates) + MOST_BEHIND
    near = [each for each in candidates if each.score <= most]
    return min(near, key=lambda each: (-each.cached_blocks, each.score, each.engine)).engine


@dataclass(frozen=True)
class Choice:
    """The engine for a request, and how many blocks of its prompt should be cached there."""

    engine: int
    cached_blocks: int = 0
    hashes: list[int] = field(default_factory=list)  # of the prompt's full blocks; with `prefixes` only
    last_used: list[int] = field(default_factory=list)  # of the cached ones: see PrefixIndex


class Balancer:
    """Knows how busy each engine is that takes requests, and with `prefixes` what it has cached."""

    def __init__(
        self, prefixes: PrefixIndex | None = None, choose: Callable[[Sequence[Candidate], int], int] | None = None
    ) -> None:
        self.loads: dict[int, EngineLoad] = {}
        self._prefixes, self._choose = prefixes, choose or choose_engine

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

    def cache_is_empty(self, engine: int) -> None:
        """Its prefix cache has been reset."""
        if self._prefixes is not None:
            self._prefixes.reset(engine)

    def choose(self, request: EngineCoreRequest) -> Choice | None:
        """Choose the engine for this request, and count the request there. None if no engine is ready. Ties go to the lowest number."""
        if (choice := self.look(request)) is not None:
            self.take(choice)
        return choice

    def look(self, request: EngineCoreRequest) -> Choice | None:
        """The engine that this request would go to now. None if none is ready."""
        if not self.loads:
            return None
        if self._prefixes is None:
            return Choice(min(sorted(self.loads), key=lambda engine: self.loads[engine].score))
        return self._by_prefix(request, self._prefixes)

    def take(self, choice: Choice) -> None:
        """The request goes there: count it."""
        self.loads[choice.engine].sent()
        if self._prefixes is not None:
            self._prefixes.sent(choice.engine, choice.hashes)

    def _by_prefix(self, request: EngineCoreRequest, prefixes: PrefixIndex) -> Choice:
        hashes = prefixes.hashes(request)
        known = {engine: prefixes.last_used(engine, hashes, request) for engine in sorted(self.loads)}
        loads = [(each, self.loads[each]) for each in known]
        candidates = [Candidate(n, load.waiting, load.running, len(known[n])) for n, load in loads]
        engine = self._choose(candidates, len(hashes))
        return Choice(engine, len(known[engine]), hashes, known[engine])

    def began(self, choice: Choice, num_cached_tokens: int) -> None:
        """The request's first token is there, and the engine says how much of its prompt it had cached."""
        if self._prefixes is not None and choice.last_used:
            self._prefixes.found(choice.engine, choice.last_used, num_cached_tokens)

    def ended(self, choice: Choice, request: EngineCoreRequest, answer: list[int]) -> None:
        """Its blocks are free from now on, and the answer's are cached too."""
        if self._prefixes is not None:
            self._prefixes.ended(choice.engine, choice.hashes, request, answer)
