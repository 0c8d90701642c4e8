"""Prompt in, EngineCoreRequest out: tokenization, and the checks that need the model's limits.

Source: vllm/v1/engine/input_processor.py (InputProcessor; Processor in 0.11).
"""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.mixins import load
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace

TEXT_TASKS = {"generate", "transcription"}
MAX_SALT_LENGTH = 1024  # characters


class InputHook:
    """A feature's part in a request before it goes to the engine: in one that uses one of its fields (`SamplingParams.HOOKS`), or in every one
    that a setting switches on."""

    def __init__(self, processor: InputProcessor) -> None:
        self.processor = processor

    def prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Change the prompt."""
        return token_ids

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Check the parameters against the model, and fill in what depends on it."""
        return params


class InputProcessor:
    """Makes engine requests. Every refusal happens here, before anything reaches the engine."""

    def __init__(self, config: VllmConfig, tokenizer: Tokenizer) -> None:
        self.vllm_config, self.tokenizer = config, tokenizer
        self._max_model_len = config.max_model_len
        self._vocab_size = config.shape.vocab_size
        self._makes_text = not TEXT_TASKS.isdisjoint(config.supported_tasks)
        self._hooks = config.hooks("input")
        self._stream_interval = config.scheduler_config.stream_interval
        if trace.on:
            trace.emit("input_processor.created")

    def process_inputs(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineCoreRequest:
        """Tokenize and validate one prompt, given as text or as token ids.

        `add_special_tokens` puts the model's beginning-of-text token, if it has one, before a text. `max_tokens` is clipped to
        the context that the prompt leaves; None becomes all of it. `priority` (smaller goes first) counts with
        --scheduling-policy priority only. Only requests with the same `cache_salt` share cached prefixes.
        Raises InvalidRequestError for an empty or too long prompt, ids out of the vocabulary, impossible `max_tokens`, an
        empty or very long salt.
        """
        if not self._makes_text:
            raise InvalidRequestError("This engine makes vectors, not text: see --runner and --convert.", "model")
        self.check_salt(cache_salt)
        token_ids = self.tokenize(prompt, add_special_tokens)
        hooks: list[InputHook] = [load(name)(self) for name in (*self._hooks, *params.hooks("input"))]
        for hook in hooks:
            token_ids = hook.prompt(token_ids, params)
        room = self._room(token_ids, params)
        for field in ("stop_token_ids", "logprob_token_ids"):
            self.check_ids(field, getattr(params, field) or ())
        params = msgspec.structs.replace(
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=self._stop_token_ids(params),
            stream_interval=params.stream_interval or self._stream_interval,
        )
        for hook in hooks:
            params = hook.resolve(params)
        trace_tokenized(request_id, prompt if isinstance(prompt, str) else None, token_ids)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_id=self.tokenizer.eos_token_id,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )

    def _room(self, token_ids: list[int], params: SamplingParams) -> int:
        """How many output tokens fit after the prompt. Raises InvalidRequestError if the prompt or `max_tokens` is impossible."""
        room = self._max_model_len - len(token_ids)
        if not token_ids:
            raise InvalidRequestError("The prompt must not be empty: it has no tokens.", "prompt")
        if room <= 0:
            raise InvalidRequestError(
                f"This model's maximum context length is {self._max_model_len} tokens, of which at least one is for the "
                f"output. The prompt has {len(token_ids)} tokens; shorten it.",
                "prompt",
            )
        if params.max_tokens is not None and params.max_tokens > self._max_model_len:
            raise InvalidRequestError(
                f"max_tokens must be at most the context length, {self._max_model_len}, got {params.max_tokens}.",
                "max_tokens",
            )
        return room

    def check_salt(self, cache_salt: str | None) -> None:
        """Raises InvalidRequestError for a salt that is empty or very long."""
        if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
            raise InvalidRequestError(f"cache_salt must have 1 to {MAX_SALT_LENGTH} characters.", "cache_salt")

    def check_ids(self, field: str, ids: Collection[int]) -> None:
        """Raises InvalidRequestError that names the token ids out of the vocabulary, ten of them at most."""
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = [str(token_id) for token_id in ids if not 0 <= token_id < self._vocab_size]
            shown = ", ".join(wrong[:10]) + ", ..." * (len(wrong) > 10)
            reason = f"{field} names token ids out of vocabulary: {shown}; the vocabulary size is {self._vocab_size}."
            raise InvalidRequestError(reason, field)

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        """The request's own, and the model's end-of-text tokens besides `eos_token_id` (Llama 3 has three in all)."""
        more = () if params.ignore_eos else self.tokenizer.more_eos_token_ids
        return [*params.stop_token_ids, *(end for end in more if end not in params.stop_token_ids)]

    def tokenize(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary. Raises InvalidRequestError."""
        if isinstance(prompt, str):
            self.check_text(prompt)
            return self.tokenizer.encode(prompt, add_special_tokens)
        self.check_ids("prompt", prompt)
        return list(prompt)

    def check_text(self, prompt: str) -> None:
        """Raises InvalidRequestError for a text that cannot fit into the context, or is not Unicode."""
        # A text that cannot fit whatever its tokens are is not tokenized: megabytes would hold up every other client.
        if len(prompt) > self._max_model_len * self.tokenizer.max_token_bytes:
            raise InvalidRequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. The prompt has {len(prompt)} "
                f"characters, which are more tokens than that in any case; shorten it.",
                "prompt",
            )
        # A lone surrogate is valid in a Python or JSON string but is not Unicode text: the tokenizer cannot encode it.
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "The prompt holds a lone surrogate, which is not Unicode text.", "prompt"
            ) from None


def trace_tokenized(request_id: str, prompt: str | None, token_ids: list[int]) -> None:
    """Record the tokens of a prompt; `prompt` is its text, if it is one."""
    if trace.on:
        text = prompt if trace.prompts else None
        ids = token_ids if trace.prompts else []
        trace.emit("request.tokenized", req=request_id, num_tokens=len(token_ids), prompt=text, token_ids=ids)
