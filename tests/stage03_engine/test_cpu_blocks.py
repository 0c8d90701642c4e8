"""Places in CPU memory beside a naive list: who is found, who has to go, and who keeps its place."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stage03_engine.core.features.kv_transfer.cpu_blocks import CPUBlocks


class Naive:
    """What CPUBlocks should be, as a list: the least recent block comes first."""

    def __init__(self, room: int) -> None:
        self.room, self.order = room, list[int]()
        self.storing, self.loads = set[int](), dict[int, int]()

    def idle(self, block: int) -> bool:
        return block not in self.storing and not self.loads.get(block)

    def recent(self, block: int) -> None:
        self.order.remove(block)
        self.order.append(block)


class MemoryMachine(RuleBasedStateMachine):
    """CPUBlocks beside a naive one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.naive = CPUBlocks(4), Naive(4)
        self.places: dict[int, int] = {}
        self.loading: list[list[int]] = []

    chains = st.lists(st.integers(0, 7), unique=True, max_size=4)

    @staticmethod
    def names(chain: list[int]) -> list[bytes]:
        return [bytes([block]) for block in chain]

    @rule(block=st.integers(0, 7))
    def store(self, block: int) -> None:
        naive, place = self.naive, self.blocks.prepare_store(bytes([block]))
        goes = next((each for each in naive.order if naive.idle(each)), None)
        if block in naive.order or (len(naive.order) == naive.room and goes is None):
            assert place is None
            return
        if len(naive.order) == naive.room:
            assert goes is not None and place == self.places.pop(goes)
            naive.order.remove(goes)
        assert place is not None and place not in self.places.values()
        self.places[block] = place
        naive.order.append(block)
        naive.storing.add(block)

    @rule(which=st.integers(0, 7))
    def stored(self, which: int) -> None:
        if self.naive.storing:
            block = sorted(self.naive.storing)[which % len(self.naive.storing)]
            self.blocks.complete_store(bytes([block]))
            self.naive.storing.remove(block)
            self.naive.recent(block)

    @rule(chain=chains)
    def load(self, chain: list[int]) -> None:
        count = self.blocks.lookup(self.names(chain))
        there = [block in self.naive.order and block not in self.naive.storing for block in chain]
        assert count == (there.index(False) if False in there else len(there))
        found = chain[:count]
        assert self.blocks.prepare_load(self.names(found)) == [self.places[block] for block in found]
        self.loading.append(found)
        for block in found:
            self.naive.loads[block] = self.naive.loads.get(block, 0) + 1

    @rule(which=st.integers(0, 7))
    def loaded(self, which: int) -> None:
        if self.loading:
            chain = self.loading.pop(which % len(self.loading))
            self.blocks.complete_load(self.names(chain))
            for block in reversed(chain):
                self.naive.loads[block] -= 1
                if self.naive.idle(block):
                    self.naive.recent(block)

    @rule(chain=chains)
    def touch(self, chain: list[int]) -> None:
        self.blocks.touch(self.names(chain))
        for block in reversed(chain):
            if block in self.naive.order and self.naive.idle(block):
                self.naive.recent(block)

    @invariant()
    def holds(self) -> None:
        self.blocks.check_invariants()


TestMemory = MemoryMachine.TestCase
