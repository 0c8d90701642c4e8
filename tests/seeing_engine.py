"""An engine in this process, asked with texts and pictures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image
from small_llava import encoded, picture

from stage02_server.features.images.decode import prepared
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.core.features.multimodal.messages import WORK
from stage03_engine.core.features.multimodal.scheduler_hook import EncoderSchedulerHook
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.frontend.features.image_inputs import attach, places_of
from stage03_engine.frontend.input_processor import InputProcessor
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY
from stage03_engine.params.multimodal import Picture
from stage03_engine.sampling_params import SamplingParams

LIMITS = (1 << 20, 1 << 20, 1 << 20)  # bytes, pixels and tokens of a picture


class SeeingEngine:
    """An engine in this process, asked with texts and pictures. `outputs` are the scheduler's decisions."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = EngineArgs.from_kwargs(
            model=str(folder), **{"num_gpu_blocks_override": 200, "check_invariants": True} | settings
        )
        self.core = EngineCore(self.config)
        tokenizer = init_tokenizer_from_configs(self.config)
        self.processor = InputProcessor(self.config, tokenizer)
        self.decisions: list[SchedulerOutput] = []
        schedule = self.core.scheduler.schedule

        def noted() -> SchedulerOutput:
            self.decisions.append(schedule())
            return self.decisions[-1]

        self.core.scheduler.schedule = noted  # type: ignore[method-assign]
        self._ids = map(str, itertools.count())

    @property
    def hook(self) -> EncoderSchedulerHook:
        return next(hook for hook in self.core.scheduler.hooks if isinstance(hook, EncoderSchedulerHook))

    def request(self, prompt: str, pictures: Sequence[int | Image], **params: Any) -> EngineCoreRequest:
        settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
        shown = [self.picture(number) for number in pictures]
        settings["image_places"] = places_of(shown, self.config.shape)
        made = self.processor.process_inputs(next(self._ids), prompt, SamplingParams(**settings))
        if pictures:
            attach(made, shown, self.config.shape)
        return made

    def picture(self, shown: int | Image) -> Picture:
        """One of small_llava's by its number, or any."""
        file = encoded(picture(shown) if isinstance(shown, int) else shown)
        return prepared(file, *LIMITS, MULTIMODAL_REGISTRY.info(self.config.shape))

    def answer(self, *requests: EngineCoreRequest) -> list[list[int]]:
        """The tokens of each, all asked at once."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.core.add_request(request)
        while self.core.has_unfinished_requests:
            for output in self.core.step().outputs:
                assert output.error is None, output.error
                tokens[output.request_id] += output.new_token_ids
        return list(tokens.values())

    def encodes(self) -> int:
        """How often the encoder ran."""
        works = [WORK.of(output.extras) for output in self.decisions]
        return sum(len(work.encode) for work in works if work is not None)
