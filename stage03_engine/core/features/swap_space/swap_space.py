"""CPU memory for the keys and values of preempted requests (`--preemption-mode swap`).

vLLM V1 only recomputes; swapping is what its first engine did (vllm/core/block_manager.py, swap_out and swap_in). Plain
Python, no tensors: the worker does the copying.
"""

from __future__ import annotations

from stage03_engine.core.kv_cache_manager import cdiv


class SwapSpace:
    """Which CPU blocks hold which request's blocks, in the order of its tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._held: dict[str, list[int]] = {}

    def swap_out(
        self, request_id: str, block_table: list[int], num_computed_tokens: int
    ) -> list[tuple[int, int]] | None:
        """(KV-cache block, CPU block) for all computed tokens of a request, or None when there is no room for them."""
        count = cdiv(num_computed_tokens, self._block_size)
        if count > len(self._free):
            return None
        self._held[request_id] = [self._free.pop() for _ in range(count)]
        return list(zip(block_table, self._held[request_id]))

    def swap_in(self, request_id: str, block_table: list[int], num_hits: int) -> list[tuple[int, int]]:
        """(CPU block, KV-cache block) for what was swapped out, except the first `num_hits` blocks, which were found in the
        prefix cache. The CPU blocks are free from now on."""
        pairs = list(zip(self._held.get(request_id, []), block_table))[num_hits:]
        self.drop(request_id)
        return pairs

    def holds(self, request_id: str) -> bool:
        """Does this request's memory lie here?"""
        return request_id in self._held

    def drop(self, request_id: str) -> None:
        """Forget what a request left here, if anything."""
        self._free.extend(self._held.pop(request_id, []))

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError when a CPU block is lost, or held for a request that does not wait."""
        held = [block for blocks in self._held.values() for block in blocks]
        assert sorted(held + self._free) == list(range(self._num_blocks)), "a CPU block is lost or used twice"
        assert self._held.keys() <= waiting, "a CPU block is held for a request that does not wait"
