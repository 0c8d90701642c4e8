"""A whole engine of the user's own behind EngineCore's methods: `--engine-cls module:Class`. vLLM has no counterpart.

The engine knows token ids and weights, and nothing of this project. It may inherit from nothing; its class has

    __init__(folder)      the folder of the model: config.json, model.safetensors
    add(request)          take an `OwnRequest`
    abort(request_id)     forget it; an id that is not there is ignored
    step()                compute, and return the new tokens: request id -> list of token ids

and ends each request by itself: with its eos_token_id, or with token number max_tokens. What surrounds it stays the project's: HTTP, the
tokenizer, streams, stop strings, the engine's process and its sockets.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.own_classes.construct import construct, import_class
from stage03_engine.errors import ConfigError, InvalidRequestError, StagesError
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SchedulerStats
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

FLAG = "--engine-cls"
SILENT_SECONDS = 60.0
"""An engine that returns from its steps without a token for so long, while somebody waits for one, has lost a request."""
PAUSE_SECONDS = 0.005  # after a step without a token: an engine that waits for something must not keep everybody busy
METHODS = ("add", "abort", "step")
KNOWN = frozenset({
    "n", "num_answers", "best_of", "temperature", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "stop_or_eos_ids",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "output_kind",
    "truncate_prompt_tokens", "truncation_side",
})  # fmt: skip
"""What a request may ask: the engine sees to temperature, seed and length, the front end and this file to the rest."""
_DEFAULTS = SamplingParams()


@dataclass(frozen=True)
class OwnRequest:
    """What the engine is told of a request."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int  # of the answer; prompt and answer together fit into the model's context
    temperature: float  # 0: always the likeliest token
    seed: int
    eos_token_id: int | None  # ends the answer; None: nothing but its length does


@dataclass
class _Running:
    """A request that the engine works on."""

    request: OwnRequest
    stop_token_ids: frozenset[int]
    arrived: float = field(default_factory=time.monotonic)
    num_tokens: int = 0  # of the answer


class OwnEngineCore:
    """EngineCore's methods around the user's engine. Raises ConfigError if it cannot be made."""

    num_gpu_blocks = 1  # the engine's memory is its own affair: there are no blocks to report but the null block

    def __init__(self, config: VllmConfig) -> None:
        path = config.device_config.engine_cls
        assert path is not None and config.model_config.model_path is not None
        self._max_model_len, self._path = config.max_model_len, path
        assert config.model_config.shape is not None
        self._vocab_size = config.model_config.shape.vocab_size
        found = import_class(path, FLAG)
        if lacking := [name for name in METHODS if not callable(getattr(found, name, None))]:
            raise ConfigError(f"{FLAG} {path}: it has no method {' and no '.join(lacking)}")
        if config.device_config.num_threads is not None:
            torch.set_num_threads(config.device_config.num_threads)
        with torch.inference_mode():
            self._engine: Any = construct(path, FLAG, Path(config.model_config.model_path))
        if trace.on:
            trace.emit("own_class.chosen", flag=FLAG, path=path)
        self.observers: list[Callable[[EngineCoreOutputs], None]] = []
        self._running: dict[str, _Running] = {}
        self._seeds, self._num_steps = random.Random(config.model_config.seed), 0
        self._heard = time.monotonic()  # when the newest token came, or the first request after a rest

    @property
    def has_unfinished_requests(self) -> bool:
        """Is there anything for `step` to do?"""
        return bool(self._running)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Hand a request to the engine. Raises ValueError if its id is in use, InvalidRequestError for what such an engine is not asked."""
        params = message.sampling_params
        if message.task is not None:
            raise InvalidRequestError("This engine writes text, and does nothing else.", None)
        for name in params.__struct_fields__:
            if name not in KNOWN and getattr(params, name) != getattr(_DEFAULTS, name):
                raise InvalidRequestError(f"This server's engine is somebody's own, and does not know {name}.", name)
        if message.request_id in self._running:
            raise ValueError(f"request id {message.request_id} is already running")
        room = self._max_model_len - len(message.prompt_token_ids)
        request = OwnRequest(
            message.request_id, list(message.prompt_token_ids),
            room if params.max_tokens is None else min(params.max_tokens, room),
            0.0 if params.greedy else params.temperature,
            self._seeds.getrandbits(63) if params.seed is None else params.seed,
            None if params.ignore_eos else message.eos_token_id,
        )  # fmt: skip
        try:
            with torch.inference_mode():
                self._engine.add(request)
        except ValueError as error:  # the engine's own mistake, and none of the request's
            raise RuntimeError(f"{FLAG} {self._path}: add() raised ValueError: {error}") from error
        if not self._running:
            self._heard = time.monotonic()
        self._running[message.request_id] = _Running(request, frozenset(params.stop_token_ids))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Let the engine forget requests; unknown ids are ignored."""
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def step(self) -> EngineCoreOutputs:
        """One step of the engine. Raises StagesError for an answer that is none."""
        outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats())
        if self._running:
            self._num_steps += 1
            outputs.step = self._num_steps
            if trace.on:
                trace.emit("engine.step", ph="B", step=outputs.step, running=len(self._running), waiting=0)
            with torch.inference_mode():
                new = self._checked(self._engine.step())
            outputs.outputs = [self._output(*item) for item in new.items() if item[1] and item[0] in self._running]
            outputs.scheduler_stats = SchedulerStats(num_running=len(self._running))
            self._listen(bool(outputs.outputs))
            if trace.on:
                trace.emit("engine.step", ph="E", step=outputs.step, running=len(self._running), waiting=0)
        for observe in self.observers:
            observe(outputs)
        return outputs

    def _listen(self, said_something: bool) -> None:
        """Raises StagesError for an engine that has been silent for too long."""
        now = time.monotonic()
        if said_something:
            self._heard = now
        elif now - self._heard > SILENT_SECONDS:
            waiting = ", ".join(list(self._running)[:3])
            said = f"step() has returned no token for {SILENT_SECONDS:.0f} s, and {waiting} waits for one"
            raise StagesError(f"{FLAG} {self._path}: {said}")
        else:
            time.sleep(PAUSE_SECONDS)

    def _checked(self, new: Any) -> dict[str, list[int]]:
        """What step() returned, if it is a dictionary of lists of token ids. What numpy and torch call integers becomes Python's."""
        try:
            found = {request_id: [token.__index__() for token in tokens] for request_id, tokens in new.items()}
        except (AttributeError, TypeError):
            said = f"{FLAG} {self._path}: step() must return a dict of lists of token ids, and returned {new!r:.200}"
            raise StagesError(said) from None
        for request_id, tokens in found.items():
            if others := [token for token in tokens if not 0 <= token < self._vocab_size]:
                said = f"step() returned the token {others[0]} for {request_id}; a token is 0 to {self._vocab_size - 1}"
                raise StagesError(f"{FLAG} {self._path}: {said}")
        return found

    def _output(self, request_id: str, tokens: list[int]) -> EngineCoreOutput:
        """The message for one request. It ends where its own last token is, whatever else the engine may have written."""
        running = self._running[request_id]
        output = EngineCoreOutput(request_id, [])
        if running.num_tokens == 0:
            output.queued_seconds = time.monotonic() - running.arrived
        for token in tokens:
            output.new_token_ids.append(token)
            running.num_tokens += 1
            if token == running.request.eos_token_id:
                output.finish_reason = FinishReason.STOP
            elif token in running.stop_token_ids:
                output.finish_reason, output.stop_reason = FinishReason.STOP, token
                self._engine.abort(request_id)  # it knows nothing of these
            elif running.num_tokens == running.request.max_tokens:
                output.finish_reason = FinishReason.LENGTH
            if output.finish_reason is not None:
                del self._running[request_id]
                break
        return output

    def call(self, method: str, *args: Any) -> bool:
        """Nothing can be asked of such an engine but to serve."""
        return False

    def on_failure(self, report: Callable[[str], None]) -> None:
        """It has no workers that could die."""

    def shutdown(self) -> None:
        """It ends with its process."""
