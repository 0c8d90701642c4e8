"""Pictures in a replay: the recording shows where they were and which were the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.multimodal.encoder_cache import EncoderCacheManager
from stage03_engine.core.features.multimodal.scheduler_hook import EncoderSchedulerHook, Span
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.replay.recording import RecordedHook
from stagetrace import Event


class RecordedEncoderHook(RecordedHook, EncoderSchedulerHook):
    """The scheduler hook of pictures, without pictures. The hashes of blocks are in the recording."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig, created: Event) -> None:
        self.scheduler, self.config = scheduler, config
        self.cache, self.spans, self._planned = EncoderCacheManager(0), WeakKeyDictionary(), {}
        self._found = {}
        self._next: list[Span] | None = None  # of the request that is about to be added

    def before_arrival(self, message: EngineCoreRequest, params: Mapping[str, Any]) -> None:
        """The pictures of the request."""
        self._next = None
        if told := params.get("images"):
            if not self.cache.cache_size:
                self.cache = EncoderCacheManager(told["room"])
            self._next = [Span(*span) for span in told["spans"]]

    def added(self, request: Request) -> None:
        """They fitted."""
        if self._next is not None:
            self.spans[request] = self._next
