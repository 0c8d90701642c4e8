"""Pictures in the scheduler (vllm/v1/core/sched/scheduler.py, `_try_schedule_encoder_inputs`). Imports no torch.

A picture is encoded in the step that computes the first of its places, and not before. If the encoder's cache has no room for it, the
request gets only the tokens in front of it. What a step encodes it also keeps, so the size of the cache bounds the work of a step too (vLLM
has two numbers for the two, which are the same unless they are set).

In the scheduler's copy of a prompt a picture's places hold numbers made of its pixels, not the one token that they all share. So blocks
with different pictures have different hashes, while what stands before a picture is shared as ever. They are negative, as no token is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.multimodal.encoder_cache import EncoderCacheManager
from stage03_engine.core.features.multimodal.messages import WORK, EncoderWork
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import InvalidRequestError
from stage03_engine.messages import payload
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY
from stage03_engine.params.multimodal import MultiModalInputs
from stagetrace import trace


class Span(NamedTuple):
    """The places of a picture."""

    offset: int
    length: int
    picture: str  # its name in the encoder cache

    @property
    def end(self) -> int:
        """The first place after it."""
        return self.offset + self.length


def made_of(identifier: str, length: int) -> list[int]:
    """A number for each place of a picture, negative, by its pixels."""
    return [-1 - (number >> 2) for number in array("Q", hashlib.shake_256(identifier.encode()).digest(8 * length))]


class EncoderSchedulerHook(SchedulerHook):
    """Installed for a model that sees.

    Invariant: whoever computes a place of a picture in a step has the picture pinned, and it was encoded before or is encoded in this step.
    """

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.cache, self._info = EncoderCacheManager(config.encoder_budget), MULTIMODAL_REGISTRY.info(config.shape)
        # Weak, because another hook may still refuse a request.
        self.spans: WeakKeyDictionary[Request, list[Span]] = WeakKeyDictionary()  # request -> its pictures
        # Of this step: request that may run -> the numbers of the pictures that it encodes.
        self._planned: dict[Request, list[int]] = {}
        self._found: dict[Request, int] = {}  # of this step: request -> pictures that are there already

    def added(self, request: Request) -> None:
        """Raises InvalidRequestError for pictures that do not fit their prompt."""
        if request.task is None:
            return
        image_token, tokens, at = self.config.shape.image_token, request.all_token_ids, 0
        inputs = payload(request.task, MultiModalInputs)
        for feature in inputs.features:
            places = slice(feature.offset, feature.offset + feature.length)
            if (
                feature.offset < at
                or not 0 < feature.length == self._info.num_tokens(feature.width, feature.height)
                or len(feature.data) != feature.width * feature.height * 3
                or tokens[places] != [image_token] * feature.length
            ):
                raise InvalidRequestError("An image does not fit its place in the prompt.", "messages")
            at = places.stop
            tokens[places] = made_of(feature.identifier, feature.length)
        if image_token in tokens:
            raise InvalidRequestError("The prompt has more places than images.", "messages")
        own = [replace(feature, identifier=self._named(request, feature.identifier)) for feature in inputs.features]
        request.task = MultiModalInputs(own)  # the runner knows each by the same name
        self.spans[request] = [Span(each.offset, each.length, each.identifier) for each in own]

    def _named(self, request: Request, identifier: str) -> str:
        """Keys share vectors no more than they share blocks: nobody finds out what another has shown."""
        if request.cache_salt is None:
            return identifier
        return hashlib.sha256(f"{identifier} {request.cache_salt}".encode()).hexdigest()

    def traced_params(self, request: Request) -> dict[str, Any]:
        """Where its pictures are, and which are the same."""
        if (spans := self.spans.get(request)) is None:
            return {}
        told = [[span.offset, span.length, span.picture[:16]] for span in spans]
        return {"images": {"spans": told, "room": self.cache.cache_size}}

    # A step

    def released(self) -> Iterable[str]:
        """A new step begins."""
        self._planned, self._found = {}, {}
        return ()

    def limited(self, request: Request, computed: int, num_tokens: int) -> int:
        """The tokens up to the first picture that cannot be encoded now. All others among these tokens are pinned."""
        if (spans := self.spans.get(request)) is None:
            return num_tokens
        planned = self._planned.setdefault(request, [])
        for number, span in enumerate(spans):
            if span.offset >= computed + num_tokens:
                break
            if span.end <= computed or not self._missing(request, number, span):
                continue
            if not self.cache.can_allocate(span.length):
                self._trace_no_room(request.request_id, number)
                return max(0, span.offset - computed)
            self.cache.allocate(span.picture, span.length, request.request_id)
            planned.append(number)
            if trace.on:
                step, tokens, free = self.scheduler.step, span.length, self.cache.num_free
                trace.emit(
                    "encoder.scheduled", req=request.request_id, step=step, image=number, tokens=tokens, free=free
                )  # fmt: skip
        return num_tokens

    def _missing(self, request: Request, number: int, span: Span) -> bool:
        """Must the picture be encoded? Pins it if not."""
        held = request.request_id in self.cache.pinned.get(span.picture, ())
        there = self.cache.pin(span.picture, request.request_id)
        if there and not held:
            self._found[request] = self._found.get(request, 0) + 1
        if trace.on and there and not held:
            trace.emit("encoder.cache_hit", req=request.request_id, step=self.scheduler.step, image=number)
        return not there

    def _trace_no_room(self, request_id: str, number: int) -> None:
        if trace.on:
            step, needed = self.scheduler.step, len(self.cache.pinned)
            trace.emit("encoder.no_room", req=request_id, step=step, image=number, needed=needed)

    def preempted(self, request: Request, output: SchedulerOutput) -> bool:
        """It will need its pictures again when it resumes; until then others may have their room."""
        self._unplan(request)
        self._release(request)
        return False

    def _unplan(self, request: Request) -> None:
        """The request runs in this step no more than those after it, so nobody else counts on what it was to encode."""
        for number in self._planned.pop(request, ()):
            span = self.spans[request][number]
            if span.picture in self.cache.lengths:
                self.cache.forget(span.picture)

    def _release(self, request: Request) -> None:
        for span in self.spans.get(request, ()):
            self.cache.release(span.picture, request.request_id)

    def scheduled(self, output: SchedulerOutput) -> None:
        """Tell the runner what to encode, and what to drop. A request that found no blocks after all encodes and pins nothing."""
        for request in [each for each in self._planned if each.request_id not in output.num_scheduled_tokens]:
            self._unplan(request)
            self._release(request)
        self._count(output)
        evicted = self.cache.take_evicted()
        if trace.on and evicted:
            trace.emit("encoder.evicted", step=output.step, images=len(evicted))
        encode = [(request.request_id, number) for request, numbers in self._planned.items() for number in numbers]
        if encode or evicted:
            WORK.put(output.extras, EncoderWork(encode, evicted))

    def _count(self, output: SchedulerOutput) -> None:
        """In pictures that a request has come to."""
        hits = sum(count for request, count in self._found.items() if request.request_id in output.num_scheduled_tokens)
        if queries := hits + sum(map(len, self._planned.values())):
            self.scheduler.stats.count(mm_cache_queries=queries, mm_cache_hits=hits)

    def decided(self, output: SchedulerOutput) -> None:
        """A picture whose places are all computed is not needed any more."""
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            for span in self.spans.get(request, ()):
                if span.end <= request.num_computed_tokens:
                    self.cache.release(span.picture, request_id)

    def finished(self, request: Request) -> None:
        """Nor are those of a request that has ended."""
        self._release(request)
        self.spans.pop(request, None)

    def prefixes_forgotten(self) -> None:
        """Nor do other weights make the same of it. The runner hears so with the next step (vLLM: reset_encoder_cache)."""
        self.cache.reset()

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        self.cache.check_invariants()
        holders = set().union(*self.cache.pinned.values())
        running = {request.request_id for request in self.scheduler.running}
        assert holders <= running, "a picture is pinned by a request that does not run"
