"""Of the block pool."""

from __future__ import annotations

from broken import broken

POOL, MANAGER = "block_pool", "kv_cache_manager"
_TAKE = "        blocks = [self._free.popitem(last=False)[1] for _ in range(count)]\n"
_CHECK = '        if count > len(self._free):\n            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")\n'
_IN_USE = (
    '            if block.ref_cnt == 0:\n                raise ValueError(f"block {block.block_id} is not in use")\n'
)
_BACK = "            if block.ref_cnt == 0:\n                self._free[block.block_id] = block\n"
_FRONT = "                if block.block_hash is None:\n                    self._free.move_to_end(block.block_id, last=False)\n"

BROKEN = [
    broken("hash", "without the parent", ("parent + array(", "array("), module=MANAGER),
    broken("hash", "without the salt", (".tobytes() + salted", ".tobytes()"), module=MANAGER),
    broken("hash", "of 32 bits a token", ('array("q", token_ids)', 'array("i", token_ids)'), module=MANAGER),
    broken("balance", "block 0 is handed out", ("in self._blocks[1:])", "in self._blocks)"), module=POOL),
    broken(
        "not_in_use",
        "block 0 can be given back",
        (_IN_USE, _IN_USE.replace("block.ref_cnt == 0:", "block.ref_cnt == 0 and block.block_id:", 1)),
        module=POOL,
    ),
    broken(
        "too_few",
        "takes what there is first",
        (
            _CHECK + _TAKE,
            _TAKE.replace("range(count)", "range(min(count, len(self._free)))")
            + "        if count > len(blocks):\n            raise ValueError\n",
        ),
        module=POOL,
    ),
    broken(
        "too_few",
        "gives fewer",
        (_CHECK + _TAKE, _TAKE.replace("range(count)", "range(min(count, len(self._free)))")),
        module=POOL,
    ),
    broken("oldest", "from the end", ("self._free.popitem(last=False)", "self._free.popitem(last=True)"), module=POOL),
    broken(
        "oldest or no_hash_first",
        "in another order",
        ("return [block.block_id for block in blocks]", "return sorted(block.block_id for block in blocks)"),
        module=POOL,
    ),
    broken(
        "references",
        "free with the first that gives it back",
        ("            block.ref_cnt -= 1\n", "            block.ref_cnt = 0\n"),
        module=POOL,
    ),
    broken(
        "references",
        "a hit is not counted",
        ("            block.ref_cnt += 1\n", "            block.ref_cnt = 1\n"),
        module=POOL,
    ),
    broken(
        "not_in_use",
        "is ignored",
        (_IN_USE, "            if block.ref_cnt == 0:\n                continue\n"),
        module=POOL,
    ),
    broken("not_in_use", "is a KeyError", ('raise ValueError(f"block', 'raise KeyError(f"block'), module=POOL),
    broken("no_hash_first", "always at the end", (_FRONT, ""), module=POOL),
    broken(
        "no_hash_first",
        "always at the front",
        ("                if block.block_hash is None:\n", "                if True:\n"),
        module=POOL,
    ),
    broken(
        "no_hash_first",
        "the other way round",
        ("                if block.block_hash is None:\n", "                if block.block_hash is not None:\n"),
        module=POOL,
    ),
    broken(
        "kept",
        "forgotten when it is freed",
        (
            _BACK,
            _BACK
            + "                if block.block_hash is not None:\n                    del self._by_hash[block.block_hash]\n",
        ),
        module=POOL,
    ),
    broken("evict", "is still found", ("        del self._by_hash[block.block_hash]\n", ""), module=POOL),
    broken(
        "evict",
        "the trace hears nothing",
        ('        if trace.on:\n            trace.emit("kv.evicted", block=block.block_id)\n', ""),
        module=POOL,
    ),
    broken(
        "touched",
        "stays in the queue",
        ("                del self._free[block.block_id]\n", "                pass\n"),
        module=POOL,
    ),
    broken(
        "first_stays",
        "the second takes the hash",
        ("        if block_hash in self._by_hash:\n            return False\n", ""),
        module=POOL,
    ),
    broken(
        "first_stays",
        "True for the second",
        (
            "        if block_hash in self._by_hash:\n            return False\n",
            "        if block_hash in self._by_hash:\n            return True\n",
        ),
        module=POOL,
    ),
    broken(
        "reset",
        "while a block is in use",
        ("        if len(self._free) != self.num_usable:\n            return False\n", ""),
        module=POOL,
    ),
    broken(
        "reset",
        "forgets nothing",
        ("        self._by_hash.clear()\n", ""),
        ("        for block in self._by_hash.values():\n            block.block_hash = None\n", ""),
        module=POOL,
    ),
]
