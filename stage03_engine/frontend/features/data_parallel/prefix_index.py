"""What the engines should have in their prefix caches, judging by the prompts and answers that went through this front end.

No engine is asked, and none tells: the index does what a cache does. Where the two part, the engines' own words put it right: with the
first token comes how much of the prompt was cached. vLLM leaves this to routers in front of several servers, some of which listen to
the events of each cache (kv_events) instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.mixins import each as each_part

UNSURE = 0
"""When a block was used last, of a request that has not ended, or never began: it may not have been computed."""


class PrefixIndex:
    """For each engine, the hashes of the blocks that it should have.

    A hash stands for all tokens up to the end of its block, and for all else that the block depends on: adapter, salt, pictures, embeddings.
    Python's own hash will do: a collision would only send a request to a worse engine. The index forgets hashes in the order in which a
    cache evicts blocks: least recently used first, the end of a text before its beginning.

    `kept`: each engine keeps copies of so many blocks elsewhere, which are found when its cache has lost them; all blocks are copied, so the
    larger number is what it can find. `share`: of all requests, those that come through this front end. It fills so much of each cache.
    """

    def __init__(self, block_size: int, kept: int = 0, share: float = 1.0) -> None:
        self._block_size, self._kept, self._share = block_size, int(kept * share), share
        self._capacity: dict[int, int] = {}
        self._known: dict[int, OrderedDict[int, int]] = {}  # hash -> when it was used last; the first to go comes first
        self._now = UNSURE

    @classmethod
    def asked(cls, config: VllmConfig) -> PrefixIndex | None:
        """The index that `--data-parallel-routing prefix` needs. None for another routing."""
        return cls.of(config) if config.data_parallel_config.data_parallel_routing == "prefix" else None

    @classmethod
    def of(cls, config: VllmConfig) -> PrefixIndex:
        """An index for these engines. Each of several front ends gets an equal part of the requests."""
        front_ends = getattr(getattr(config, "front_ends", None), "num_front_ends", 1)
        kept = max((kept(config) for kept in each_part(VllmConfig, "kept_blocks")), default=0)
        return cls(config.cache_config.block_size, kept, 1 / front_ends)

    def join(self, engine: int, num_blocks: int) -> None:
        """A new engine, with an empty cache of this many blocks."""
        self._capacity[engine] = max(1, int(num_blocks * self._share), self._kept)
        self._known[engine] = OrderedDict()

    def leave(self, engine: int) -> None:
        """The engine takes no more requests. It may have gone before."""
        self._known.pop(engine, None)
        self._capacity.pop(engine, None)

    def reset(self, engine: int) -> None:
        """Its cache is empty again; what it keeps elsewhere stays."""
        if engine in self._known:
            self._shrink(engine, self._kept)

    def hashes(self, request: EngineCoreRequest) -> list[int]:
        """A hash for each full block of the prompt."""
        return self._extended([], request, _read_tokens(request))

    def _extended(self, hashes: list[int], request: EngineCoreRequest, tokens: Sequence[int]) -> list[int]:
        """The hashes with those of the blocks that the tokens fill after them: all tokens from the first on, or after `hashes` the ones that
        follow their blocks."""
        size, made = self._block_size, list(hashes)
        parent = made[-1] if made else hash(_keys(request))
        for start in range(0, len(tokens) - size + 1, size):
            parent = hash((parent, *tokens[start : start + size]))
            made.append(parent)
        return made

    def last_used(self, engine: int, hashes: Sequence[int], request: EngineCoreRequest) -> list[int]:
        """When the first blocks of the prompt were used last, as far as the engine should find them. The last token is always computed, and
        a request that needs more of its prompt than keys and values computes all of it."""
        known, most = self._known[engine], (len(request.prompt_token_ids) - 1) // self._block_size
        if _needs_all(request):
            return []
        found = []
        for each in hashes[:most]:
            if each not in known:
                break
            found.append(known[each])
        return found

    def sent(self, engine: int, hashes: Sequence[int]) -> None:
        """The engine gets a prompt with these blocks."""
        self._use(engine, hashes, UNSURE)

    def ended(self, engine: int, hashes: list[int], request: EngineCoreRequest, answer: Sequence[int]) -> None:
        """The engine has these blocks, and those that the answer filled. The last token of an answer is never computed."""
        if engine not in self._known:
            return  # it died meanwhile
        rest = len(request.prompt_token_ids) - len(hashes) * self._block_size
        tokens = [*_read_tokens(request)[len(request.prompt_token_ids) - rest :], *answer[:-1]]
        self._now += 1
        self._use(engine, self._extended(hashes, request, tokens), self._now)

    def _use(self, engine: int, hashes: Sequence[int], when: int) -> None:
        known = self._known[engine]
        for each in reversed(hashes):
            known[each] = when
            known.move_to_end(each)
        self._shrink(engine, self._capacity[engine])

    def _shrink(self, engine: int, most: int) -> None:
        known = self._known[engine]
        while len(known) > most:
            known.popitem(last=False)

    def found(self, engine: int, last_used: Sequence[int], num_cached_tokens: int) -> None:
        """The engine found so much of a prompt, whose blocks it should have had, and used last then. If it has lost one, it has lost all that
        was used before that one."""
        missed = num_cached_tokens // self._block_size
        if missed >= len(last_used) or engine not in self._known or (when := last_used[missed]) == UNSURE:
            return
        known = self._known[engine]
        for _ in range(len(known)):
            each, used = next(iter(known.items()))
            if used > when:
                break
            if used == UNSURE:
                known.move_to_end(each)
            else:
                del known[each]


def _needs_all(request: EngineCoreRequest) -> bool:
    """Does it need more of its prompt than keys and values, so that all of it is computed?"""
    asks = getattr(request.sampling_params, "prompt_logprobs", None) is not None
    return asks or getattr(request.task, "needs_all_tokens", False)


def _keys(request: EngineCoreRequest) -> tuple[Any, ...]:
    """What the hash of the first block begins with: what `KVCacheManager` and the hooks of adapters and embeddings put there. The fields are
    those of rooms, which may be absent."""
    params = request.sampling_params
    return request.cache_salt, *(getattr(params, name, None) for name in ("lora", "lora_int_id", "prompt_embeds"))


def _read_tokens(request: EngineCoreRequest) -> Sequence[int]:
    """The prompt, with what a picture shows in its places: all pictures have the same tokens there."""
    pictures: Iterable[Any] = getattr(request.task, "features", ())
    tokens = request.prompt_token_ids
    if pictures:
        tokens = list(tokens)
    for each in pictures:
        seen = hash(each.identifier)
        tokens[each.offset : each.offset + each.length] = [hash((seen, place)) for place in range(each.length)]
    return tokens
