"""Adapters in the scheduler: their blocks are kept apart, and at most `--max-loras` of them are in a batch. Imports no torch.

A batch has as many places as `--max-loras`. An adapter takes a place with its first request and keeps it until its last one has ended; in
a preempted request it keeps it too. A request whose adapter finds no place is held back, and all others overtake it, those of adapters
with a place and those without one, as in vLLM's scheduler. A place that becomes free goes to the adapter that has waited longest.

Nobody starves. While an adapter waits, requests that come after it may use a place that is taken, `max_num_seqs` of them. Then the place
that was taken longest closes: whoever else wants it waits behind, so its last request comes, and the place is free.

Source: vllm/v1/core/sched/scheduler.py (`scheduled_loras`), which lets such requests wait for as long as the others keep coming.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.lora.messages import CHANGES, REPORT, Changes, adapter_of
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import POLICIES, Request, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stagetrace import trace


@dataclass
class Known:
    """An adapter that requests may name."""

    name: str
    digest: str  # of its files
    failures: int = 0  # how often it could not be read again

    def hash_key(self, number: int) -> str:
        """What keys and values that it changed depend on. Not only its name: under the same one others may have been loaded before. Blocks of
        requests that failed have not seen it."""
        return f"lora:{self.name}:{number}:{self.digest}:{self.failures}"


class LoRASchedulerHook(SchedulerHook):
    """Installed with `--enable-lora`.

    Invariant: the running requests use adapters in `places` only, and there are at most `max_loras` of these.
    """

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        lora = config.lora_config
        self.max_loras = lora.max_loras
        self.known = {each.number: Known(each.name, each.digest) for each in lora.adapters()}
        self.places: dict[
            int, set[str]
        ] = {}  # adapter -> the requests that may use it; the one taken first comes first
        self.waiting: dict[int, dict[str, Request]] = {}  # adapter -> the requests that are held back, in order
        self.pinned: set[int] = set()  # they keep a place without a request
        self._closed: int | None = None  # the adapter whose place takes no more requests
        self._overtakers = 0  # while somebody waits
        self._asked_pins: set[int] | None = None  # `pinned`, from the next decision on
        self._leaving: dict[int, Known] = {}  # removed, but unfinished requests use them
        self._failed: dict[str, str] = {}  # requests that end because of their adapter, and why
        self._removed: list[int] = []  # the workers are told with the next step

    # Arrivals

    def added(self, request: Request) -> None:
        """Its blocks are found again by requests with the same adapter only. One that is leaving is still there for those that the front end
        sent before: of several answers some may come late."""
        if number := adapter_of(request.sampling_params):
            if (adapter := self._adapter(number)) is None:
                raise InvalidRequestError(f"lora: the adapter {request.sampling_params.lora!r} is not loaded.", "lora")
            request.add_hash_key(adapter.hash_key(number))

    def _adapter(self, number: int) -> Known | None:
        return self.known.get(number) or self._leaving.get(number)

    def traced_params(self, request: Request) -> dict[str, Any]:
        """Its adapter, and how many places there are."""
        number = adapter_of(request.sampling_params)
        return {"lora": {"id": number, "max_loras": self.max_loras}} if number else {}

    def holds(self, request: Request) -> bool:
        """Until its adapter has a place."""
        number, request_id = adapter_of(request.sampling_params), request.request_id
        if not number or request_id in self.places.get(number, ()):
            return False
        if request_id in self.waiting.get(number, ()):
            return True
        if number in self.places and number != self._closed:
            self.places[number].add(request_id)
            return False
        if number not in self.places and not self.waiting and len(self.places) < self.max_loras:
            self.places[number] = {request_id}
            return False
        self._hold(number, request)
        return True

    def _hold(self, number: int, request: Request) -> None:
        self.waiting.setdefault(number, {})[request.request_id] = request
        if trace.on:
            holders = {str(each): sorted(requests) for each, requests in self.places.items()}
            trace.emit("lora.waiting", req=request.request_id, adapter=request.sampling_params.lora, holders=holders)

    # Before each decision

    def released(self) -> Iterable[str]:
        """Gives the places that are free to the adapters that have waited longest; their requests need not wait any more."""
        released = self._change_pins()
        if self._closed is None and self._overtakers >= self.scheduler.config.max_num_seqs:
            self._close()
        while wanting := [number for number in self.waiting if number not in self.places]:
            if len(self.places) >= self.max_loras:
                break
            released += self._give_place(min(wanting, key=self._turn))
        if not wanting and self._closed is not None:  # nobody else wants the place
            released += self._give_place(self._closed)
        return released

    def _give_place(self, number: int) -> list[str]:
        """All requests of the adapter may run. Returns those that were held back."""
        requests = list(self.waiting.pop(number, {}))
        self.places.setdefault(number, set()).update(requests)
        self._overtakers = 0
        if number == self._closed:
            self._closed = None
        return requests

    def _turn(self, number: int) -> tuple[int, ...]:
        """Whose turn it is: the smallest, by the policy's order of requests, or else by their arrival."""
        order = POLICIES.get(self.scheduler.config.scheduling_policy, POLICIES["fcfs"])
        return min(map(order, self.waiting[number].values()))

    def _close(self) -> None:
        """The place that was taken longest takes no more requests: those that have not begun wait behind."""
        self._closed = next((number for number in self.places if number not in self.pinned), None)
        if (number := self._closed) is None:
            return
        scheduler, keep = self.scheduler, set[str]()
        for request_id in sorted(self.places[number], key=lambda each: scheduler.requests[each].arrival):
            request = scheduler.requests[request_id]
            if request.status != RequestStatus.WAITING:
                keep.add(request_id)
            elif request_id not in scheduler.held:  # else it is asked again when nothing else holds it back
                scheduler.waiting.remove(request)
                scheduler.held[request_id] = request
                self._hold(number, request)
        self.places[number] = keep
        self._leave_place(number)

    def admitted(
        self, request: Request, output: SchedulerOutput, new_blocks: list[int], first: int, num_matched: int
    ) -> None:
        """Counts those that overtake: they came later than somebody who waits, or are another API key's."""
        if (
            self.waiting
            and adapter_of(request.sampling_params) in self.places
            and request.status == RequestStatus.WAITING
        ):
            waiting = min((next(iter(held.values())) for held in self.waiting.values()), key=POLICIES["fcfs"])
            self._overtakers += request.arrival > waiting.arrival or request.tenant != waiting.tenant

    def _leave_place(self, number: int) -> None:
        """The place is free if nobody uses it any more."""
        if not self.places.get(number, True) and number not in self.pinned:
            del self.places[number]
            if number == self._closed:
                self._closed = None

    def finished(self, request: Request) -> None:
        """An adapter leaves its place with its last request; one that was removed is forgotten with it."""
        number = adapter_of(request.sampling_params)
        if not number:
            return
        self.places.get(number, set()).discard(request.request_id)
        self._leave_place(number)
        if number in self.waiting:
            self.waiting[number].pop(request.request_id, None)
            if not self.waiting[number]:
                del self.waiting[number]
        if not self.waiting:
            self._overtakers = 0
        if number in self._leaving and self._requests_of(number) == [request]:
            del self._leaving[number]
            self._removed.append(number)

    # A step

    def decided(self, output: SchedulerOutput) -> None:
        """The workers hear which adapters have left."""
        if self._removed:
            CHANGES.put(output.extras, self.take_changes())

    def take_changes(self) -> Changes:
        """What the workers have not been told yet."""
        removed, self._removed = self._removed, []
        return Changes(remove=removed)

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """What was computed without an adapter that could not be read is dropped."""
        report = REPORT.of(runner_output.extras)
        for number, why in ({} if report is None else report.failed).items():
            requests = dict.fromkeys(request.request_id for request in self._requests_of(number))
            self._failed |= dict.fromkeys(requests, why)
            if (adapter := self._adapter(number)) is not None:
                adapter.failures += 1
            for request_id in requests:
                runner_output.drop(request_id)
            if trace.on:
                trace.emit("lora.failed", step=output.step, id=number, message=why)
        return []

    def poll(self) -> tuple[list[EngineCoreOutput], bool | None]:
        """Ends the requests whose adapter could not be read. True if a place is free that somebody waits for."""
        failed, self._failed = self._failed, {}
        ended = []
        for request_id in [each for each in failed if each in self.scheduler.requests]:
            output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=failed[request_id])
            output.error_param = "lora"
            ended.append(output)
        self.scheduler.finish_requests([output.request_id for output in ended], FinishReason.ERROR)
        return ended, True if self.waiting and (len(self.places) < self.max_loras or self._closed is not None) else None

    def _requests_of(self, number: int) -> list[Request]:
        return [
            request for request in self.scheduler.requests.values() if adapter_of(request.sampling_params) == number
        ]

    # Calls

    def remove(self, number: int) -> bool:
        """Forget an adapter; unfinished requests keep it to their end. False if it is unknown."""
        if (adapter := self.known.pop(number, None)) is None:
            return False
        self._ask_pins(self._pins() - {number})
        if self._requests_of(number):
            self._leaving[number] = adapter
        else:
            self._removed.append(number)
        return True

    def pin(self, number: int) -> bool:
        """Let an adapter keep a place for good. False if it is unknown. Raises ConfigError if the others would have none."""
        if number not in self.known:
            return False
        pins = self._pins() | {number}
        if len(pins) >= self.max_loras:
            raise ConfigError(
                f"lora: pinning {self.known[number].name!r} leaves no place for other adapters; --max-loras is {self.max_loras}"
            )
        self._ask_pins(pins)
        return True

    def _pins(self) -> set[int]:
        return self.pinned if self._asked_pins is None else self._asked_pins

    def _ask_pins(self, pins: set[int]) -> None:
        if pins != self._pins():
            self._asked_pins = pins

    def _change_pins(self) -> list[str]:
        """A pinned adapter keeps the place that it has or gets next. With a step, so that a replay can do the same. Returns the requests that
        need not wait any more."""
        if self._asked_pins is None:
            return []
        self.pinned, self._asked_pins = self._asked_pins, None
        for number in list(self.places):
            self._leave_place(number)
        if trace.on:
            trace.emit("lora.pinned", step=self.scheduler.step, ids=sorted(self.pinned))
        # a closed place that is pinned will not become free: it is open again, and another may close
        return self._give_place(self._closed) if self._closed is not None and self._closed in self.pinned else []

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        assert len(self.places) <= self.max_loras, "more adapters than places"
        for request in self.scheduler.running:
            number = adapter_of(request.sampling_params)
            assert not number or request.request_id in self.places[number], f"{request.request_id} has no place"
        for held in self.waiting.values():
            assert held and held.keys() <= self.scheduler.held.keys(), "a request waits for a place, and is not held"
