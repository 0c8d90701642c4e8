"""The blocks of the KV cache: who has which, and which are free (vllm/v1/core/block_pool.py). Plain Python, no tensors."""

from __future__ import annotations

from collections import deque

NULL_BLOCK = 0
"""Never given to a request: padding in a block table points here, so that a stray read hits nobody's tokens."""


class BlockPool:
    """Hands out block ids and takes them back.

    Invariant: every block except the null block is either free or used, never both (`check_invariants`).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self._free: deque[int] = deque(range(1, num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return len(self._used) / self.num_usable

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, the longest-free first. Raises ValueError when there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. Raises KeyError for one that is not in use (it would be handed out twice)."""
        for block in blocks:
            self._used.remove(block)
            self._free.append(block)

    def check_invariants(self) -> None:
        """Raises AssertionError when free + used is not all."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._used, "a block is free and used"
        assert free | self._used == set(range(1, self.num_usable + 1)), "a block is lost"
