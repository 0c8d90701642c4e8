"""Workers as threads, that talk through a stand-in for torch.distributed: for the judge of exercise 14.

Nobody waits for ever: when all that still run wait for something that cannot come any more, each of them gets `Stuck`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from stage03_engine.core.features.distributed.parallel_state import destroy_distributed, init_distributed
from stage03_engine.core.features.distributed.ranks import Ranks


class Stuck(Exception):
    """This worker waits for what no other one will do."""


class Workers:
    """Runs the same function as several workers at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()  # .rank
        self.changed = threading.Condition()
        self.board: dict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)  # exchange -> what each worker brought
        self.calls = [0] * size
        self.mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.waits: dict[int, Callable[[], bool]] = {}
        self.ended: set[int] = set()

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """What each worker returns. Raises the first exception, one of the work rather than Stuck."""
        results, errors = [None] * self.size, list[BaseException]()

        def one(rank: int) -> None:
            self.here.rank = rank
            try:
                results[rank] = work(Ranks(rank, self.size))
            except BaseException as error:
                errors.append(error)
            with self.changed:
                self.ended.add(rank)
                self.changed.notify_all()

        with self.in_place_of_torch():
            threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in sorted(errors, key=lambda each: isinstance(each, Stuck)):
            raise error
        return results

    @contextmanager
    def in_place_of_torch(self) -> Iterator[None]:
        names = ("all_reduce", "all_gather", "send", "recv", "isend", "irecv", "get_rank", "get_world_size")
        fakes = {name: getattr(self, name) for name in names}
        fakes |= {"init_process_group": mock.Mock(), "new_group": mock.Mock(), "is_initialized": lambda: False}
        with mock.patch.multiple(torch.distributed, **fakes):
            init_distributed(Ranks(0, self.size), "threads", "cpu")
            try:
                yield
            finally:
                destroy_distributed()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """With the lock held: wait. Raises Stuck if nobody is left who could change anything."""
        rank = self.here.rank
        self.waits[rank] = ready
        self.changed.notify_all()
        try:
            while not ready():
                others = set(range(self.size)) - self.ended
                if all(other in self.waits and not self.waits[other]() for other in others):
                    raise Stuck("every worker that still runs waits for another one")
                self.changed.wait()
        finally:
            del self.waits[rank]
            self.changed.notify_all()

    def gathered(self, kind: str, x: Tensor) -> list[Tensor]:
        """Every worker's x in this exchange. Before the workers run, who sets them up speaks for all."""
        if not hasattr(self.here, "rank"):
            return [x] * self.size
        with self.changed:
            number = self.calls[self.here.rank]
            self.calls[self.here.rank] += 1
            posts = self.board[number]
            posts[self.here.rank] = (kind, x.clone())
            self.wait_until(lambda: len(posts) == self.size)
            if {kind for kind, _ in posts.values()} != {kind}:
                raise Stuck(f"exchange {number + 1} is {', '.join(posts[rank][0] for rank in range(self.size))}")
            return [posts[rank][1].clone() for rank in range(self.size)]

    # What torch.distributed has.

    def get_rank(self, group: Any = None) -> int:
        return int(self.here.rank)

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        parts = self.gathered("all_reduce", tensor)
        tensor.copy_(sum(parts[1:], parts[0]))

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
        for place, part in zip(tensor_list, self.gathered("all_gather", tensor), strict=True):
            place.copy_(part)

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        self.isend(tensor, dst).wait()

    def recv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> int:
        box = self.mail[src, self.here.rank]
        with self.changed:
            self.wait_until(lambda: bool(box))
            tensor.copy_(box.popleft())
            self.changed.notify_all()
        return src

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        box, letter = self.mail[self.here.rank, dst], tensor.clone()
        with self.changed:
            box.append(letter)
            self.changed.notify_all()
        return mock.Mock(wait=lambda: self._until_taken(box, letter))

    def _until_taken(self, box: deque[Tensor], letter: Tensor) -> None:
        with self.changed:
            self.wait_until(lambda: all(each is not letter for each in box))

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        return mock.Mock(wait=lambda: self.recv(tensor, src))
