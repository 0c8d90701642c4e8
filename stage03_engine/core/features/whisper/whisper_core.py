"""Speech to text: an engine core around transformers' Whisper (vllm/model_executor/models/whisper.py; Radford et al. 2022,
"Robust Speech Recognition via Large-Scale Weak Supervision").

It replaces EngineCore and uses the same messages, so that nothing around it changes. There is no
paged cache and no batch: the encoder runs once per request, then each step gives every request one token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.logits_rules.logits_rules import RequestRules, make_rules
from stage03_engine.core.features.profiler.profiler import TorchProfiler
from stage03_engine.core.features.whisper.whisper_timestamps import apply_timestamp_rules, token_ends
from stage03_engine.core.models.layers import check_finite
from stage03_engine.core.request import POLICIES, Request, RequestQueue, RequestStatus
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    TokenLogprobs,
    payload,
)
from stage03_engine.params.audio import AudioInput, SpeechDetails
from stage03_engine.plugins import wanted
from stage04_kernels.sampler import SamplingMetadata, gather_logprobs, sample
from stagetrace import trace

SAMPLE_RATE = 16_000
MOST_HEARD = 16
"""Requests at once. Each holds the cross-attention's keys and values of 30 seconds, 18 MB in tiny and 245 MB in large-v3 (float16), and more
at once are no faster: the model hears one after the other."""


@dataclass
class Listening:
    """A request and what the model remembers of it."""

    request: Request
    audio: AudioInput
    rules: RequestRules | None  # what the sampling parameters ask of the logits
    encoded: Any = None  # the encoder's output; None before the first step
    past: Any = None  # keys and values of the decoder
    last_step: int = 0  # that gave it a token
    no_speech_prob: float = 0.0  # known after the first step, if there are timestamps

    @property
    def samples(self) -> np.ndarray:
        """float32 [num_samples], 16,000 per second."""
        return np.frombuffer(self.audio.samples, dtype=np.float32)


class WhisperCore:
    """Requests in the order of `--scheduling-policy`, at most `max_num_seqs` of them at a time, and `MOST_HEARD`.

    The model hears one request after the other, so a step with many takes as long as many steps. Therefore a step begins with one
    new request at most, and under the policy fair each API key gets as many tokens of a step as the others.
    """

    num_gpu_blocks = 0

    def __init__(self, config: VllmConfig) -> None:
        try:
            from transformers import (
                GenerationConfig,
                WhisperConfig,
                WhisperFeatureExtractor,
                WhisperForConditionalGeneration as Whisper,
            )
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            raise ConfigError("Whisper needs transformers; install the project with its extra `audio`") from None
        disable_progress_bar()  # of loading: a server's log is no terminal
        if config.device_config.num_threads is not None:
            torch.set_num_threads(config.device_config.num_threads)
        self.config, self.device = config, torch.device(config.device_config.device)
        model_config, dtype = config.model_config, getattr(torch, config.model_config.dtype)
        folder = model_config.model_path
        try:
            if model_config.load_format == "dummy":
                torch.manual_seed(model_config.seed)
                self.model = Whisper(WhisperConfig.from_pretrained(folder)).to(dtype)
            else:
                self.model = Whisper.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
            self.features = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot load Whisper from {folder}: {error}") from error
        for name, parameter in self.model.named_parameters():
            check_finite(name, parameter)
        self.model.eval().to(self.device)
        generation: GenerationConfig = self.model.generation_config
        self._never = list(generation.suppress_tokens or [])
        self._not_first = list(generation.begin_suppress_tokens or [])
        self._max_first_time = getattr(generation, "max_initial_timestamp_index", None)
        self._seeds = random.Random(model_config.seed)
        self._listening: dict[str, Listening] = {}
        policy = config.scheduler_config.scheduling_policy
        make_queue = RequestQueue if policy in POLICIES else wanted("policy", policy, f"scheduling policy {policy}")
        self._waiting, self._running = make_queue(policy), make_queue(policy)
        self._by_key, self._arrivals = policy not in POLICIES, itertools.count()
        self._profiler = TorchProfiler(config.observability_config.profiler_dir)
        self._num_steps = 0
        if trace.on:
            parameters = list(self.model.parameters())
            num_bytes = sum(p.numel() * p.element_size() for p in parameters)
            trace.emit("whisper.loaded", tensors=len(parameters), bytes=num_bytes)

    @property
    def has_unfinished_requests(self) -> bool:
        """Is there anything for `step` to do?"""
        return bool(self._listening)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError when its id is in use, InvalidRequestError when it has no audio, or asks for the
        times of words from a model that cannot give them."""
        if message.task is None:
            raise InvalidRequestError("This model listens: a request needs audio.", "file")
        audio = payload(message.task, AudioInput)
        if audio.word_timestamps and not getattr(self.model.generation_config, "alignment_heads", None):
            raise InvalidRequestError(
                "This model cannot tell when a word was said: its generation_config.json names no alignment_heads. "
                "Ask for the timestamps of segments.",
                "timestamp_granularities[]",
            )
        if message.request_id in self._listening:
            raise ValueError(f"request id {message.request_id} is already running")
        seed = message.sampling_params.seed
        request = Request(message, self._seeds.getrandbits(63) if seed is None else seed)
        rules = RequestRules.of(message.sampling_params, self.config.shape.vocab_size)
        self._listening[message.request_id] = Listening(request, audio, rules)
        request.arrival = next(self._arrivals)
        self._waiting.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once; unknown ids are ignored."""
        for request_id in request_ids:
            if request_id in self._listening:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        request = self._listening.pop(request_id).request
        (self._running if request.status == RequestStatus.RUNNING else self._waiting).remove(request)

    def on_failure(self, report: Callable[[str], None]) -> None:
        """The model runs in this process: there is no worker that could die alone."""

    def call(self, method: str, *args: Any) -> bool:
        """The profiler; there is no prefix cache to forget, and no scheduler to watch."""
        if method == "reset_prefix_cache":
            return not self._listening
        if method == "start_profile":
            return self._profiler.start(self._num_steps)
        return method == "stop_profile" and self._profiler.stop(self._num_steps)

    @torch.inference_mode()
    def step(self) -> EngineCoreOutputs:
        """One token for each request that runs; those whose key has more than another wait for their turn."""
        self._num_steps += 1
        self._admit()
        outputs = [self._next(listening) for listening in self._in_turn()]
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        return EngineCoreOutputs(outputs, self.make_stats())

    def _admit(self) -> None:
        """One more request, as hearing it takes long. Each key may have one whatever the others have, and more only while no
        other key has any."""
        full = len(self._running) >= min(self.config.scheduler_config.max_num_seqs, MOST_HEARD)
        if full and not self._by_key:
            return
        keys = {request.tenant for request in self._running} if self._by_key else set()
        enough = keys if full or len(keys) > 1 else ()
        admitted = False
        for request in self._waiting.in_turn():
            if admitted:  # only now has the queue noted whose turn it was
                return
            if admitted := request.tenant not in enough:
                self._waiting.remove(request)
                request.status = RequestStatus.RUNNING
                self._running.add(request)

    def _in_turn(self) -> list[Listening]:
        """Those that get a token: all, or of each key as many as of the one with the fewest."""
        keys: dict[int | None, list[Listening]] = {}
        for request in self._running:
            keys.setdefault(request.tenant if self._by_key else None, []).append(self._listening[request.request_id])
        share = min(map(len, keys.values()), default=0)
        chosen = [each for own in keys.values() for each in sorted(own, key=lambda one: one.last_step)[:share]]
        for listening in chosen:
            listening.last_step = self._num_steps
        return chosen

    def make_stats(self) -> SchedulerStats:
        """The state after a step, for the metrics."""
        return SchedulerStats(num_running=len(self._running), num_waiting=len(self._waiting))

    def _next(self, listening: Listening) -> EngineCoreOutput:
        request = listening.request
        new = request.all_token_ids[request.num_computed_tokens :]
        if listening.encoded is None:
            listening.encoded = self._encode(listening)
        result = self.model(
            encoder_outputs=listening.encoded,
            decoder_input_ids=torch.tensor([new], device=self.device),
            past_key_values=listening.past,
            use_cache=True,
        )
        listening.past, request.num_computed_tokens = result.past_key_values, request.num_tokens
        if listening.audio.timestamps_from is not None and not request.num_output_tokens:
            listening.no_speech_prob = self._no_speech(result.logits[0], listening)
        token, logprobs = self._sample(result.logits[:, -1].float(), listening)
        output = request.append_output_tokens([token], self.config.max_model_len)
        output.new_logprobs = logprobs
        output.queued_seconds = 0.0 if request.num_output_tokens == 1 else None
        if output.finish_reason is not None and listening.audio.timestamps_from is not None:
            output.result = {"speech": self._speech(listening)}
        return output

    def _encode(self, listening: Listening) -> Any:
        """The encoder's view of up to 30 seconds: log-mel features in, [1, num_frames / 2, hidden_size] out."""
        samples = listening.samples
        features = self.features(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        if trace.on:
            seconds = len(samples) / SAMPLE_RATE
            trace.emit("whisper.encoded", req=listening.request.request_id, seconds=seconds)
        return self.model.get_encoder()(features.to(self.device, self.model.dtype))

    def _sample(self, raw: Tensor, listening: Listening) -> tuple[int, list[TokenLogprobs] | None]:
        """The next token, and its logprobs if they are asked for. raw: [1, vocab_size]."""
        request, logits = listening.request, raw
        params, place = request.sampling_params, request.num_output_tokens
        prompt, output = (
            request.all_token_ids[: request.num_prompt_tokens],
            request.all_token_ids[-place:] if place else [],
        )
        if params.allowed_token_ids is None:  # else the request does not ask for text
            logits = logits.clone()
            logits[:, self._never + (self._not_first if place == 0 else [])] = float("-inf")
        if listening.audio.timestamps_from is not None:
            end = request.eos_token_id if request.eos_token_id is not None else self.model.config.eos_token_id
            logits = apply_timestamp_rules(logits, output, listening.audio.timestamps_from, end, self._max_first_time)
        metadata = SamplingMetadata.from_lists(
            [0.0 if params.greedy else params.temperature], [params.top_k], [params.top_p], [params.min_p],
            [request.seed], [place], device=self.device,
            rules=make_rules([(listening.rules, np.array(prompt), np.array(output, dtype=np.int64))], self.device),
        )  # fmt: skip
        chosen = sample(logits, metadata).sampled_token_ids
        if params.logprobs is None:
            return int(chosen), None
        ids, logprobs, ranks = gather_logprobs(raw, chosen, params.logprobs)
        return int(chosen), [TokenLogprobs(ids[0].tolist(), logprobs[0].tolist(), int(ranks))]

    def _no_speech(self, logits: Tensor, listening: Listening) -> float:
        """How likely <|nospeech|> is right after <|startoftranscript|>. logits: [num_prompt_tokens, vocab_size]."""
        assert listening.audio.timestamps_from is not None
        prompt = listening.request.all_token_ids
        places = [place for place, token in enumerate(prompt) if token == self.model.config.decoder_start_token_id]
        start = places[-1] if places else 0  # none: the tokenizer has another token of that name than the model
        return float(logits[start].float().softmax(dim=-1)[listening.audio.timestamps_from - 2])

    def _speech(self, listening: Listening) -> SpeechDetails:
        request, ends = listening.request, None
        if listening.audio.word_timestamps:
            seconds = len(listening.samples) / SAMPLE_RATE
            tokens, start = request.all_token_ids, request.num_prompt_tokens
            ends = token_ends(self.model, listening.encoded, tokens, start, seconds)
            if trace.on:
                trace.emit("whisper.aligned", req=request.request_id, tokens=len(ends))
        return SpeechDetails(listening.no_speech_prob, ends)

    def shutdown(self) -> None:
        """Release the model."""
        self._listening.clear()
        del self.model
