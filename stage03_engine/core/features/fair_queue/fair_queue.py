"""`--scheduling-policy fair`: API keys take turns, and within each key HTTP requests do, so that one with thousands holds up no other.

**Keys.** With several API keys each has a queue of its own, in the order below; the keys stand in a circle too, and what is said of groups
holds for them once more: a turn admits one request, rounds give tokens to one request of each key, and the key with the most running
requests is preempted first. With one key, or none, there is one queue.

The engine requests of one HTTP request (its prompts, their answers, its beams) are a group. Their ids tell it (`stagetrace.ids`), so
a recording holds all that a replay needs. There is no clock and no randomness. vLLM has no counterpart.

**Waiting.** The groups stand in a circle; a new one takes the last place. In its turn a group gives the request that arrived first;
once that is admitted, the group goes to the last place. Requests that a hook holds back are passed over. As under fcfs, nobody is
admitted before the request in turn if that does not fit. A preempted request goes first within its group, whose next turn comes at
once: it lost what the last one had given.

**Running.** Who runs keeps running. Tokens are given in rounds: to the first request of each group, then to the second of each. The
last one in this order is preempted first: the newest of the largest group. (Under fcfs it would be the newest of all: a newcomer
would lose its place to the growing crowd beside which it was just admitted.) So the victim has no tokens in this step yet.

**Nobody starves.** The first of the running requests is never preempted for another, so every step brings something forward. Between
two turns of a group each other group has one, and one more for a request that was preempted; that one was running before, so
there are only so many, and newcomers wait behind.

**With one HTTP request** both orders are those of arrival, and every decision is that of fcfs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import attrgetter

from stage03_engine.core.request import Request, RequestStatus
from stagetrace import trace
from stagetrace.ids import root_of

_arrival = attrgetter("arrival")


class FairQueue:
    """What a scheduler asks of `RequestQueue`, in the order above: a queue for each API key.

    A step that lists all of n requests of k keys does O(n + k) work.
    """

    def __init__(self, policy: str = "fair") -> None:
        self._keys: OrderedDict[int | None, KeyQueue] = OrderedDict()  # in their order, none empty

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def __iter__(self) -> Iterator[Request]:
        """In rounds. Requests at the end of the order may be removed meanwhile."""
        waiting = deque(iter(queue) for queue in self._keys.values())
        while waiting:
            if (request := next(waiting[0], None)) is None:
                waiting.popleft()
            else:
                yield request
                waiting.rotate(-1)

    def __getitem__(self, index: int) -> Request:
        """O(n): for custom schedulers that count; the reference scheduler iterates."""
        return list(self)[index]

    def add(self, request: Request) -> None:
        """Put a request into the queue of its key."""
        self._keys.setdefault(request.tenant, KeyQueue()).add(request)
        if request.status == RequestStatus.PREEMPTED:
            self._keys.move_to_end(request.tenant, last=False)

    def remove(self, request: Request) -> None:
        """Take a request out. Only when `in_turn` has just given it is this the turn of its key."""
        queue = self._keys[request.tenant]
        queue.remove(request)
        if not queue:
            del self._keys[request.tenant]

    def pop(self) -> Request:
        """Remove and return the last request of the key that has the most, of equal ones the last."""
        largest = max(reversed(self._keys.values()), key=len)
        request = largest.last
        self.remove(request)
        return request

    def in_turn(self) -> Iterator[Request]:
        """The waiting requests, each when it may be admitted. Whoever is removed when it is given was: the turn passes on. Who
        stays is passed over, and the next of its key is asked."""
        circle = deque((key, queue, queue.in_turn()) for key, queue in self._keys.items())
        given = {key: next(turns, None) for key, _, turns in circle}
        while circle:
            key, queue, turns = circle.popleft()
            while (request := given[key]) is not None:
                size = len(queue)
                yield request
                admitted = len(queue) < size
                given[key] = next(turns, None)  # now: it notes whose turn it was
                if admitted:
                    if key in self._keys:
                        self._keys.move_to_end(key)
                    circle.append((key, queue, turns))
                    break


class KeyQueue:
    """The requests of one key.

    `add` and `remove` search in O(log n). Each way through lists the groups once, and then needs O(1) for each request.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[str, list[Request]] = OrderedDict()  # in their order; each by arrival, none empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """In rounds. Requests at the end of the order may be removed meanwhile."""
        groups, place = list(self._groups.values()), 0
        while groups:
            for group in groups:
                if place < len(group):
                    yield group[place]
            place += 1
            groups = [group for group in groups if place < len(group)]

    def add(self, request: Request) -> None:
        """Put a request into its group."""
        name = root_of(request.request_id)
        insort(self._groups.setdefault(name, []), request, key=_arrival)
        if request.status == RequestStatus.PREEMPTED:
            self._groups.move_to_end(name, last=False)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Take a request out. Only when `in_turn` has just given it is this the turn of its group."""
        name = root_of(request.request_id)
        group = self._groups[name]
        del group[bisect_left(group, request.arrival, key=_arrival)]
        if not group:
            del self._groups[name]
        self._length -= 1

    @property
    def last(self) -> Request:
        """The last request in the order: the newest of the largest group, of equal ones the last."""
        return max(reversed(self._groups.values()), key=len)[-1]

    def in_turn(self) -> Iterator[Request]:
        """The waiting requests, each when it may be admitted. Whoever is removed when it is given was: the turn passes on. Who
        stays is passed over, and the next of its group is asked."""
        circle, passed_over = deque(self._groups), dict[str, int]()  # thousands may wait: no object for each
        while circle:
            name = circle.popleft()
            group, place = self._groups.get(name, ()), passed_over.get(name, 0)
            while place < len(group):
                yield (request := group[place])
                if place >= len(group) or group[place] is not request:
                    self._pass_on(name, request)
                    circle.append(name)
                    passed_over[name] = place
                    break
                place += 1

    def _pass_on(self, name: str, admitted: Request) -> None:
        if name in self._groups:
            self._groups.move_to_end(name)
        if trace.on:
            own = len(self._groups.get(name, ()))
            others = len(self._groups) - (own > 0)
            trace.emit("sched.turn", req=admitted.request_id, group=name, own=own, others=others)
