"""The block pool: which blocks of the KV cache are in use, which are free, and what the free ones still hold.

Plain Python, no tensors. Which lists and dicts you keep is yours to choose. (With --check-invariants the engine looks inside the
pool, and expects the names of the reference: see its check_pool. Without it, nobody looks.)
"""

from __future__ import annotations

from collections.abc import Sequence

from stagetrace import trace


def evicted(block_id: int) -> None:
    """Given, for you to call: tells the trace that a block which could still be found is handed out to somebody else."""
    if trace.on:
        trace.emit("kv.evicted", block=block_id)


def hash_block_tokens(parent: bytes, token_ids: Sequence[int], salt: str | None) -> bytes:
    """The name of one full block: sha256 over three things, one after the other.

    `parent`     the hash of the block before this one (of the first block: a seed)
    `token_ids`  the tokens of this block, each as a signed integer of 8 bytes, the lowest byte first
    `salt`       if it is not None: b"salt" and the salt's characters in UTF-8

    Returns the digest: 32 bytes.
    """
    raise NotImplementedError


class BlockPool:
    """Hands out the numbers of blocks and takes them back, and remembers full blocks by the hash of their tokens.

    A block in use has one reference per request that uses it. A block without references is free, and stands in the free
    queue; allocate takes from the front of it. All arguments named block_ids are lists without duplicates.
    """

    def __init__(self, num_blocks: int) -> None:
        """Blocks 1 to num_blocks - 1, all free, in this order. Block 0 exists, but is never handed out: padding in a block
        table points to it. `self.num_usable` must be num_blocks - 1."""
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """How many blocks are free; those that can still be found are among them."""
        raise NotImplementedError

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is in use: 0.0 to 1.0."""
        raise NotImplementedError

    def num_free_among(self, block_ids: list[int]) -> int:
        """How many of these blocks are free now (each of them may be free or in use)."""
        raise NotImplementedError

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free queue, one reference each, and return their numbers in this order.

        One that could still be found by a hash is evicted: its hash is forgotten, and evicted(block_id) is called.
        Raises ValueError if fewer are free; then nothing has changed.
        """
        raise NotImplementedError

    def touch(self, block_ids: list[int]) -> None:
        """Another request uses these blocks, too: one more reference each. One that was free leaves the free queue, wherever
        it stands there, and keeps its hash."""
        raise NotImplementedError

    def free(self, block_ids: list[int]) -> None:
        """A request gives one reference of each of these blocks back, in the order of the list.

        A block that has none left joins the free queue: with a hash at the end, without one at the front. One after the other:
        free([3, 1]) of two blocks without a hash puts 3 at the front, and then 1 before it.
        Raises ValueError for a block that is not in use. (What becomes of the other blocks of such a list is left to you.)
        """
        raise NotImplementedError

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds these tokens, free or in use; None if there is none."""
        raise NotImplementedError

    def cache(self, block_id: int, block_hash: bytes) -> bool:
        """A block in use, which has no hash yet, is full: from now on lookup finds it by this hash. Returns True.

        Changes nothing and returns False if another block already has this hash.
        """
        raise NotImplementedError

    def reset(self) -> bool:
        """Forget all hashes, and return True. Changes nothing and returns False while any block is in use."""
        raise NotImplementedError
