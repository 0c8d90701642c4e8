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

SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 5 tokens": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "chunks of 16 tokens": {"max_num_batched_tokens": 16, "max_num_seqs": 6},
    "long prompts in parts": {"long_prefill_token_threshold": 7},
    "one picture at a time": {"max_num_encoder_input_tokens": 1},
    "one picture at a time, in chunks": {"max_num_encoder_input_tokens": 1, "max_num_batched_tokens": 11, "max_num_seqs": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "odd blocks": {"block_size": 3, "num_gpu_blocks_override": 600},
    "preempted": {},
    "preempted, one picture at a time": {"max_num_encoder_input_tokens": 1},
    "preempted, swapped": {"swap_space": 0.01, "preemption_mode": "swap"},
    "preempted, ahead, in chunks": {
        "async_scheduling": True, "max_num_batched_tokens": 13, "max_num_seqs": 8, "max_num_encoder_input_tokens": 1,
    },
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "by priority": {"scheduling_policy": "priority"},
    "fair": {"scheduling_policy": "fair"},
    "eager": {"enforce_eager": True},
    "reference attention": {"attention_backend": "reference"},
    "torch attention": {"attention_backend": "torch"},
    "plain products": {"linear_backend": "torch"},
    "in tiles": {"batch_invariant": True},
    "in tiles, in chunks": {"batch_invariant": True, "max_num_batched_tokens": 16, "max_num_seqs": 6},
    "no chunks": {"enable_chunked_prefill": False, "max_num_encoder_input_tokens": 1},
}  # fmt: skip
"""None of which changes an answer. Those with `preempted` also need so few blocks that somebody has to give way."""
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


def same_answers(
    folder: Path,
    prompts: dict[str, Any],
    expected: dict[str, list[int]],
    settings: dict[str, Any],
    preempts: bool,
    places: int,
) -> None:
    """All prompts at once, twice: the second time much of them is in the caches. A picture has at least so many `places`."""
    engine = SeeingEngine(folder, **settings)
    try:
        for _ in range(2):
            answers = engine.answer(*(engine.request(*each) for each in prompts.values()))
            assert dict(zip(prompts, answers, strict=True)) == {name: expected[name] for name in prompts}
        if preempts:
            assert any(output.preempted_req_ids for output in engine.decisions), "nothing was preempted"
        for output in engine.decisions:
            if (work := WORK.of(output.extras)) is not None:
                assert len(work.encode) * places <= engine.config.encoder_budget
        counts = engine.core.scheduler.stats.counts
        assert counts["mm_cache_queries"] - counts["mm_cache_hits"] == engine.encodes() > 0
    finally:
        engine.core.shutdown()
