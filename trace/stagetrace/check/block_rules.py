"""The KV-cache blocks of an engine, followed through its events: who holds which, and does it add up?"""

from __future__ import annotations

from stagetrace.check.invariants import Notes
from stagetrace.event import Event


class _Pool:
    """The blocks of one engine. A shared block has one holder per request."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1  # block 0 is never given away
        self.held: dict[str, list[int]] = {}
        self.holders: dict[int, int] = {}  # block -> how many requests hold it; free ones are absent
        self.cached: set[int] = set()

    def take(self, request_id: str, blocks: list[int]) -> None:
        self.held.setdefault(request_id, []).extend(blocks)
        for block in blocks:
            self.holders[block] = self.holders.get(block, 0) + 1

    def give_back(self, request_id: str, blocks: list[int]) -> list[int]:
        """Return those that the request did not hold."""
        mine, foreign = self.held.get(request_id, []), []
        for block in blocks:
            if block not in mine:
                foreign.append(block)
                continue
            mine.remove(block)
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
        if not mine:
            self.held.pop(request_id, None)
        return foreign


class BlockBalance:
    """A block is allocated only when it is free, found only when it is cached, and given back only by its holder; a request
    that ends or is preempted holds none; and this count of free blocks is the scheduler's."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def feed(self, event: Event, notes: Notes) -> None:
        if event.name == "scheduler.created":
            self._pools[event.pid] = _Pool(event.args["num_blocks"])
        pool = self._pools.get(event.pid)
        if pool is None:
            return
        wrong = self._wrong(event, pool)
        if wrong:
            notes.add("blocks", (event.pid, event.name), f"{event.ref}: {event.name} {event.req or ''}: {wrong}", event)

    def _wrong(self, event: Event, pool: _Pool) -> str:
        """Update the account; return what contradicts it."""
        request_id, blocks = event.req or "", event.args.get("blocks", [])
        match event.name:
            case "kv.allocated":
                used = [b for b in blocks if b in pool.holders or not 0 < b <= pool.num_usable]
                pool.take(request_id, blocks)
                return f"blocks {used} are not free" if used else ""
            case "sched.prefix_hit":
                unknown = [b for b in blocks if b not in pool.cached]
                pool.take(request_id, blocks)
                return f"blocks {unknown} are not cached" if unknown else ""
            case "kv.freed":
                foreign = pool.give_back(request_id, blocks)
                return f"blocks {foreign} are not the request's" if foreign else ""
            case "kv.cached":
                foreign = [b for b in blocks if b not in pool.held.get(request_id, [])]
                pool.cached.update(blocks)
                return f"blocks {foreign} are not the request's" if foreign else ""
            case "kv_transfer.writing":
                unused = [b for b in blocks if b not in pool.holders]
                pool.take(event.name, blocks)
                return f"blocks {unused} are not in use" if unused else ""
            case "kv_transfer.written":
                foreign = pool.give_back("kv_transfer.writing", blocks)
                return f"blocks {foreign} are not being written" if foreign else ""
            case "kv.evicted":
                block = event.args["block"]
                wrong = block in pool.holders or block not in pool.cached
                pool.cached.discard(block)
                return f"block {block} is in use, or was not cached" if wrong else ""
            case "kv.reset" if event.args["done"]:
                pool.cached.clear()
                return f"{len(pool.holders)} blocks are in use" if pool.holders else ""
            case "sched.scheduled" | "spec.scheduled":
                foreign = [b for b in event.args["new_blocks"] if b not in pool.held.get(request_id, [])]
                return f"new blocks {foreign} are not the request's" if foreign else ""
            case "sched.preempt" | "sched.finished":
                left = pool.held.get(request_id, [])
                return f"blocks {left} were not given back" if left else ""
            case "sched.output":
                free = pool.num_usable - len(pool.holders)
                said = event.args["free_blocks"]
                return f"{said} blocks are said to be free, by the events it is {free}" if free != said else ""
        return ""

    def end(self, notes: Notes) -> None:
        """A request that still holds blocks has not ended, which another rule reports."""
