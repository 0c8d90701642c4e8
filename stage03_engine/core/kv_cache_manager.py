"""Which blocks hold the tokens of which request, and which of them another request can reuse.

Plain Python, no tensors. Source: vllm/v1/core/kv_cache_manager.py (KVCacheManager), kv_cache_utils.py (hash_block_tokens).
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence

from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request
from stagetrace import trace


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def hash_block_tokens(parent: bytes, token_ids: Sequence[int], salt: str | None) -> bytes:
    """sha256 over the parent block's hash, the tokens of one full block (and any that what lies in it depends on), and the salt.

    The parent makes the hash stand for the whole prefix: the same 16 tokens after another beginning have other keys and
    values. All blocks have the same number of tokens, so parent and tokens cannot be confused with each other.
    """
    salted = b"" if salt is None else b"salt" + salt.encode()
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + salted).digest()


class KVCacheManager:
    """The block table of every request that holds blocks, and the prefix cache over all blocks.

    While a request holds blocks its block table only grows at the end, so what was sent to the worker stays valid. The one
    exception is `trim`; the worker does the same by itself.
    `hash_seed` begins every chain of hashes: if it is random, no client can construct hashes to find out which tokens are
    cached. With `enable_caching` False no block is ever found again.
    """

    def __init__(
        self, block_pool: BlockPool, block_size: int, enable_caching: bool = False, hash_seed: bytes = b"", lookahead: int = 0
    ) -> None:  # fmt: skip
        self.block_size, self.lookahead = block_size, lookahead
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self._hash_seed = hashlib.sha256(hash_seed).digest()
        self.tables: dict[str, list[int]] = {}  # request id -> its blocks, in the order of its tokens
        self.num_cached: dict[str, int] = {}  # request id -> how many of them can be found by their hash

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest cached prefix of a request, in full blocks, of at most all but one of its tokens.

        The last token is always computed: its logits give the next one, and logits are not cached. A
        request that needs more of its prompt than keys and values (`skip_reading_prefix_cache`) computes all of it.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return []
        self._hash_full_blocks(request)
        hits: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _hash_full_blocks(self, request: Request) -> None:
        """Extend the request's chain of hashes to all of its known tokens that fill a block, and the `lookahead` after it."""
        size, hashes, seen = self.block_size, request.block_hashes, self.block_size + self.lookahead
        for start in range(len(hashes) * size, len(request.all_token_ids) - seen + 1, size):
            parent = hashes[-1] if hashes else self._beginning(request)
            # The salt enters the first block only: every later hash contains it through its parent.
            salt = request.cache_salt if not hashes else None
            hashes.append(hash_block_tokens(parent, request.all_token_ids[start : start + seen], salt))

    def _beginning(self, request: Request) -> bytes:
        """What the chain of hashes begins with: requests find each other's blocks only if all their `hash_keys` are equal."""
        if not request.hash_keys:
            return self._hash_seed
        return hashlib.sha256(self._hash_seed + json.dumps(request.hash_keys).encode()).digest()

    def new_block_hashes(self, request: Request) -> list[str]:
        """Hashes of the blocks that the request's tokens filled since the last call, shortened to 16 hex digits: a trace
        may hold these, so that a replay finds the same prefixes without knowing the tokens."""
        if not self.enable_caching:
            return []
        self._hash_full_blocks(request)
        first, request.num_traced_hashes = request.num_traced_hashes, len(request.block_hashes)
        return [block_hash[:8].hex() for block_hash in request.block_hashes[first:]]

    def allocate_slots(self, request: Request, num_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Make room for the first `num_tokens` tokens of a request; `hits` are what `get_computed_blocks` found, for a
        request that holds no blocks yet.

        Returns the blocks appended to its table (hits first, perhaps none); if too few are free, changes nothing and returns
        None. The tokens count as cached from now on: they are computed in this step, and within a step every layer writes
        all keys and values before it reads any.
        """
        table = self.tables.get(request.request_id, [])
        missing = cdiv(num_tokens, self.block_size) - len(table) - len(hits)
        appended = list(hits)
        if missing > 0 or hits:
            if missing > self.block_pool.num_free - self.block_pool.num_free_among(appended):
                return None
            self.block_pool.touch(appended)
            allocated = self.block_pool.allocate(max(0, missing))
            appended += allocated
            table += appended
            self.tables[request.request_id] = table
            if trace.on and allocated:
                trace.emit("kv.allocated", req=request.request_id, blocks=allocated)
        if self.enable_caching and num_tokens // self.block_size > self.num_cached.get(request.request_id, 0):
            self._cache_full_blocks(request, num_tokens, len(hits))
        return appended

    def _cache_full_blocks(self, request: Request, num_tokens: int, num_hits: int) -> None:
        self._hash_full_blocks(request)
        first = self.num_cached.get(request.request_id, num_hits)
        end = max(first, min(num_tokens // self.block_size, len(request.block_hashes)))
        table = self.tables[request.request_id]
        new = [table[i] for i in range(first, end) if self.block_pool.cache(table[i], request.block_hashes[i])]
        self.num_cached[request.request_id] = end
        if trace.on and new:
            trace.emit("kv.cached", req=request.request_id, blocks=new)

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens` tokens: they held rejected drafts."""
        table = self.tables[request_id]
        needed = cdiv(num_tokens, self.block_size)
        self.tables[request_id] = table[:needed]
        self._free(request_id, table[needed:])

    def _free(self, request_id: str, blocks: list[int]) -> None:
        self.block_pool.free(blocks)
        if trace.on and blocks:
            trace.emit("kv.freed", req=request_id, blocks=blocks)

    def free(self, request_id: str) -> int:
        """Free all blocks of a request, if it has any; returns how many.

        The end of the sequence is freed first, so it is evicted first: a shorter prefix is more likely to be shared.
        """
        blocks = self.tables.pop(request_id, [])
        self.num_cached.pop(request_id, None)
        self._free(request_id, blocks[::-1])
        return len(blocks)

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of a request, in the order of its tokens."""
        return self.tables[request_id]
