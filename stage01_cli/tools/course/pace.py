"""The engine of `stages course serve` keeps a load's pace: every request joins before the step that the load names, and every client
that leaves is gone after the token that it names, however fast the machine is. So two runs can be compared step by step.

The door puts `EngineCoreProc` of this file in the place of the project's own. It keeps back what arrives until it is due, and runs no step
while something is due that has not arrived. The scheduler, the student's or the project's, sees nothing of it: it lies between the
sockets and the core. vLLM has no counterpart.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
from collections import Counter
from typing import Any

from stage03_engine import messages
from stage03_engine.core.engine_core_proc import EngineCoreProc as Unpaced
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType

PATIENCE = 30.0  # seconds without a message while one is due: only what never comes takes so long
PREFIX = "[course]"
_NAME = re.compile(r"[a-z]+-([a-zA-Z0-9_]+)-")


def name_of(request_id: str) -> str:
    """`cmpl-r0-5f3a...` -> `r0`: the client sent it as X-Request-Id."""
    found = _NAME.match(request_id)
    return found[1] if found else request_id


class Pace:
    """What of a load is due, after the steps and tokens so far. Knows names, no messages.

    `asks` are the requests: {"name", "step": join before this step, "after": [name, count]: or after another's token,
    "gone": the front end aborts it after this many of its own tokens}. `calls` and `calls_step`: so many calls of the engine
    are answered together, before that step.
    """

    def __init__(self, asks: list[dict[str, Any]], calls: int = 0, calls_step: int = 1) -> None:
        self.asks = {ask["name"]: ask for ask in asks}
        self.tokens = Counter[str]()
        self.steps = 0  # that were run
        self.joined: list[str] = []
        self.ended = set[str]()
        self.calls, self.calls_step = calls, calls_step

    def joining(self, idle: bool) -> list[str]:
        """Who joins before the next step, in the order of the load. If nobody is there, the next one comes before its time."""
        due = [name for name, ask in self.asks.items() if name not in self.joined and self._is_due(ask)]
        if not due and idle:
            due = [name for name in self.asks if name not in self.joined][:1]
        return due

    def _is_due(self, ask: dict[str, Any]) -> bool:
        if after := ask.get("after"):
            return self.tokens[after[0]] >= after[1] or after[0] in self.ended
        return bool(self.steps + 1 >= ask.get("step", 1))

    def leaving(self) -> list[str]:
        """Who must be gone before the next step: it has had all the tokens that its client, or its stop string, lets it have."""
        return [
            name
            for name in self.joined
            if name not in self.ended and 0 < self.asks[name].get("gone", 0) <= self.tokens[name]
        ]

    def calls_due(self, idle: bool) -> bool:
        """Are the calls answered before the next step?"""
        return self.calls > 0 and (idle or self.steps + 1 >= self.calls_step)

    def saw(self, outputs: list[EngineCoreOutput]) -> None:
        """A step has been run."""
        self.steps += 1
        for output in outputs:
            self.tokens[name_of(output.request_id)] += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended.add(name_of(output.request_id))


class EngineCoreProc(Unpaced):
    """Invariant: a step begins only when everything that is due before it has arrived and was handled, in the load's order."""

    def __init__(self, *args: Any) -> None:
        load = json.loads(os.environ["STAGES_LOAD"])
        self.pace = Pace(load["asks"], load.get("calls", 0), load.get("calls_step", 1))
        self.together = load.get("together", 1)  # the front end hears of so many steps at once
        self.kept_back: list[EngineCoreOutput] = []
        self.arrived: dict[str, EngineCoreRequest] = {}
        self.gone: dict[str, str] = {}  # name -> id of the request, whose abort has arrived
        self.calls: list[messages.UtilityRequest] = []
        super().__init__(*args)
        self.core.observers.append(self._observe)

    def _process_input_queue(self) -> None:
        """Wait for what is due, hand it on, and then go on as ever."""
        self._empty_queue()
        while missing := self._missing():
            try:
                self._handle(*self.input_queue.get(timeout=PATIENCE))
            except queue.Empty:
                self._give_up(missing)
        self._hand_on()
        super()._process_input_queue()

    def _empty_queue(self) -> None:
        while not self.input_queue.empty():
            self._handle(*self.input_queue.get_nowait())

    def _missing(self) -> list[tuple[str, str]]:
        """(what, whose) is due and has not arrived. Before the first step everybody must be there."""
        if not self.pace.steps:
            if not self.arrived:  # the load has not begun
                return []
            missing = [("request", name) for name in self.pace.asks if name not in self.arrived]
        else:
            missing = [("abort", name) for name in self.pace.leaving() if name not in self.gone]
        if self.pace.calls_due(self._idle) and len(self.calls) < self.pace.calls:
            missing.append(("call", f"{self.pace.calls - len(self.calls)} of {self.pace.calls}"))
        return missing

    @property
    def _idle(self) -> bool:
        return bool(self.pace.steps) and not self.core.has_unfinished_requests

    def _give_up(self, missing: list[tuple[str, str]]) -> None:
        for what, name in missing:
            print(f"{PREFIX} the engine waited in vain for the {what} of {name}", file=sys.stderr, flush=True)
            self.pace.asks.get(name, {}).pop("gone", None)
            if what == "request":
                del self.pace.asks[name]
            elif what == "call":
                self.pace.calls = 0

    def _hand_on(self) -> None:
        """What is due before the next step."""
        for name in self.pace.leaving():
            self.pace.ended.add(name)
            self._now(EngineCoreRequestType.ABORT, messages.AbortRequests([self.gone.pop(name)]))
        if self.arrived and self.pace.calls_due(self._idle):
            self.pace.calls = 0
            for call in self.calls:
                self._now(EngineCoreRequestType.UTILITY, call)
        if not self.pace.steps and len(self.arrived) < len(self.pace.asks):
            return
        for name in self.pace.joining(not self.core.has_unfinished_requests):
            self.pace.joined.append(name)
            self._now(EngineCoreRequestType.ADD, self.arrived[name])

    def _now(self, kind: EngineCoreRequestType, message: object) -> None:
        super()._handle(kind, message)

    def _handle(self, request_type: EngineCoreRequestType | None, message: object) -> None:
        """Keep back what belongs to the load."""
        if isinstance(message, EngineCoreRequest) and (name := name_of(message.request_id)) in self.pace.asks:
            self.arrived[name] = message
        elif isinstance(message, messages.AbortRequests):
            known = {each: name_of(each) for each in message.request_ids}
            kept = {name: each for each, name in known.items() if self.pace.asks.get(name, {}).get("gone")}
            self.gone |= {name: each for name, each in kept.items() if name not in self.pace.ended}
            if others := [each for each in message.request_ids if each not in kept.values()]:
                super()._handle(request_type, messages.AbortRequests(others, message.cause))
        elif isinstance(message, messages.UtilityRequest) and self.pace.calls:
            self.calls.append(message)
        else:
            super()._handle(request_type, message)

    def _observe(self, outputs: EngineCoreOutputs) -> None:
        """Count a step; with `together` its outputs may have to wait for those of the next ones."""
        if outputs.step is None:
            return
        self.pace.saw(outputs.outputs)
        self.kept_back += outputs.outputs
        if self.pace.steps % self.together and not self.pace.leaving() and self.core.has_unfinished_requests:
            outputs.outputs = []
        else:
            outputs.outputs, self.kept_back = self.kept_back, []
