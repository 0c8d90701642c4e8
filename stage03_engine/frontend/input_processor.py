"""Prompt in, EngineCoreRequest out: tokenization and the checks that need the model's limits.

Source: vllm/v1/engine/processor.py (Processor; InputProcessor in later versions).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.params.pooling_params import TOKEN_TASKS, PoolingParams
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import trace

MAX_SALT_LENGTH = 1024  # characters


class InputProcessor:
    """Makes engine requests. Every refusal happens here, before anything reaches the engine."""

    def __init__(self, config: VllmConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = config.max_model_len
        self._vocab_size = config.shape.vocab_size
        self._pooling = config.pooling_config if config.is_pooling else None
        self._hidden_size, self._tasks = config.shape.hidden_size, config.supported_tasks
        self._has_priorities = config.scheduler_config.scheduling_policy == "priority"
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

        `add_special_tokens` lets the tokenizer begin a text with the model's beginning-of-text token, if it has one.
        `max_tokens` is clipped to the context that the prompt leaves; None becomes all of it. `priority` counts under
        --scheduling-policy priority only (smaller goes first). Only requests with the same `cache_salt` share cached prefixes.
        Raises InvalidRequestError for an empty or too long prompt, ids out of the vocabulary, impossible `max_tokens`, a
        priority without that policy, an empty or very long salt.
        """
        if self._pooling is not None:
            raise InvalidRequestError("This engine makes vectors, not text: see --runner and --convert.", "model")
        self._check_scheduling(priority, cache_salt)
        token_ids = self._truncate(self._tokenize(prompt, add_special_tokens), params)
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
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params = msgspec.structs.replace(params, max_tokens=max_tokens, **self._settled(params))
        _trace_tokenized(request_id, prompt, token_ids)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_id=self._tokenizer.eos_token_id,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )

    def process_pooling_inputs(
        self,
        request_id: str,
        prompt: str | list[int] | tuple[str, str],
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineCoreRequest:
        """The same for a pooling request, whose prompt may fill the context to its end.

        `truncate_prompt_tokens` keeps the last k tokens of the prompt, or the first with
        `truncation_side` "right"; -1 keeps as many as the context holds.
        Two texts are one prompt for a cross-encoder, joined as the model's tokenizer joins pairs; there it cuts the end off
        the longer text. Raises InvalidRequestError as `process_inputs` does, for impossible `dimensions`, for a task that the
        model does not have, and on an engine that generates.
        """
        if self._pooling is None:
            raise InvalidRequestError("This engine makes text; vectors need one with --runner pooling.", "model")
        self._check_scheduling(priority, cache_salt)
        self._check_task(params)
        if params.dimensions is not None and not 1 <= params.dimensions <= self._hidden_size:
            raise InvalidRequestError(
                f"dimensions must be in [1, {self._hidden_size}], the model's hidden size, got {params.dimensions}.",
                "dimensions",
            )
        if isinstance(prompt, tuple):
            if truncation_side == "left":
                raise InvalidRequestError(
                    "Of two texts the ends are cut off; leave truncation_side out.", "truncation_side"
                )
            token_ids = self._tokenize_pair(prompt, truncate_prompt_tokens)
        else:
            token_ids = self._tokenize(prompt, add_special_tokens)
        token_ids = self._fitting(token_ids, truncate_prompt_tokens, truncation_side)
        kind = "ALL" if params.task in TOKEN_TASKS else params.pooling_type or self._pooling.pooling_type
        _trace_tokenized(request_id, prompt, token_ids)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY),
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            task=msgspec.structs.replace(params, needs_all_tokens=kind != "LAST"),
        )

    def _check_task(self, params: PoolingParams) -> None:
        if params.task not in self._tasks:
            raise InvalidRequestError(f"This engine's model has no {params.task} task.", "task")
        if params.dimensions is not None and params.task not in ("embed", "token_embed"):
            raise InvalidRequestError("dimensions cuts embeddings; classes are all or none.", "dimensions")

    def _fitting(self, token_ids: list[int], keep: int | None, side: str | None) -> list[int]:
        """The input of a pooling request, its beginning (or with `side` "right" its end) cut off as far as `keep` says."""
        limit = self._max_model_len
        if keep is not None:
            if not (keep == -1 or 1 <= keep <= limit):
                raise InvalidRequestError(
                    f"truncate_prompt_tokens must be -1 or in [1, {limit}], got {keep}.", "truncate_prompt_tokens"
                )
            keep = limit if keep == -1 else keep
            token_ids = token_ids[:keep] if side == "right" else token_ids[-keep:]
        if not token_ids:
            raise InvalidRequestError("The input must not be empty: it has no tokens.", "input")
        if len(token_ids) > limit:
            raise InvalidRequestError(
                f"This model's maximum context length is {limit} tokens. The input has {len(token_ids)}; shorten it, or "
                "let truncate_prompt_tokens do it.",
                "input",
            )
        return token_ids

    def _check_scheduling(self, priority: int, cache_salt: str | None) -> None:
        if priority != 0 and not self._has_priorities:
            raise InvalidRequestError("priority needs a server with --scheduling-policy priority.", "priority")
        if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
            raise InvalidRequestError(f"cache_salt must have 1 to {MAX_SALT_LENGTH} characters.", "cache_salt")

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The last `truncate_prompt_tokens` tokens, or the first with `truncation_side` "right"; with -1 as many as leave
        room for one token of output."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep > self._max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most the context length, {self._max_model_len}, got {keep}.",
                "truncate_prompt_tokens",
            )
        keep = self._max_model_len - 1 if keep == -1 else keep
        return token_ids[:keep] if params.truncation_side == "right" else token_ids[-keep:]

    def _settled(self, params: SamplingParams) -> dict[str, Any]:
        """Check the token ids that the parameters name; what `bad_words`, `min_tokens` and the model's further ends of
        text come to as token ids, and the server's default for what the request leaves open."""
        named = ("logit_bias", "allowed_token_ids", "logprob_token_ids")
        for field, ids in ((name, getattr(params, name) or ()) for name in named):
            if len(ids) > self._vocab_size:
                raise InvalidRequestError(f"{field} must name at most {self._vocab_size} ids, got {len(ids)}.", field)
            for token_id in ids:
                if not 0 <= token_id < self._vocab_size:
                    raise InvalidRequestError(
                        f"{field} names token id {token_id}: ids are 0 to {self._vocab_size - 1}.", field
                    )
        stops = self._stop_token_ids(params)
        ends = {*stops, self._tokenizer.eos_token_id}
        ends = {i for i in ends if i is not None and 0 <= i < self._vocab_size}
        if params.min_tokens and params.allowed_token_ids and not set(params.allowed_token_ids) - ends:
            raise InvalidRequestError("allowed_token_ids leaves nothing to write before min_tokens.", "min_tokens")
        return {
            "stop_token_ids": stops,
            "stop_or_eos_ids": sorted(ends) if params.min_tokens else [],
            "stream_interval": params.stream_interval or self._stream_interval,
            "bad_words_token_ids": self._bad_words(params.bad_words),
        }

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        """Those of the request, and the ends of text that the model has besides its `eos_token_id` (Llama 3 has three)."""
        more = () if params.ignore_eos else self._tokenizer.more_eos_token_ids
        return [*params.stop_token_ids, *(end for end in more if end not in params.stop_token_ids)]

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word at the start of a text and in the middle of one, where it has a space before it."""
        texts = {prefix + word.lstrip() for word in words for prefix in ("", " ")}
        return [self._tokenize(text, add_special_tokens=False) for text in sorted(texts)]

    def _tokenize(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            self._check_text(prompt)
            return self._tokenizer.encode(prompt, add_special_tokens)
        if prompt and not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            wrong = next(token_id for token_id in prompt if not 0 <= token_id < self._vocab_size)
            raise InvalidRequestError(
                f"Token id {wrong} is out of the vocabulary: ids are 0 to {self._vocab_size - 1}.", "prompt"
            )
        return list(prompt)

    def _tokenize_pair(self, texts: tuple[str, str], keep: int | None) -> list[int]:
        """At most `keep` tokens, the special ones between and around the texts among them."""
        for text in texts:
            self._check_text(text)
        keep = self._max_model_len if keep == -1 else keep
        token_ids = self._tokenizer.encode_pair(*texts, keep)
        if keep is not None and len(token_ids) > keep:
            raise InvalidRequestError(
                f"truncate_prompt_tokens {keep} leaves no room for the texts.", "truncate_prompt_tokens"
            )
        return token_ids

    def _check_text(self, prompt: str) -> None:
        # What cannot fit whatever its tokens are is not tokenized: megabytes of text would hold up every other client.
        if len(prompt) > self._max_model_len * self._tokenizer.max_token_bytes:
            raise InvalidRequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. The prompt has {len(prompt)} "
                f"characters, which are more tokens than that in any case; shorten it.",
                "prompt",
            )
        # A lone surrogate is a valid Python and JSON string but no Unicode text: the tokenizer cannot take it.
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "The prompt holds a lone surrogate, which is not Unicode text.", "prompt"
            ) from None


def _trace_tokenized(request_id: str, prompt: str | list[int] | tuple[str, str], token_ids: list[int]) -> None:
    if trace.on:
        texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, tuple) else []
        text = "\n".join(texts) if trace.prompts and texts else None
        ids = token_ids if trace.prompts else []
        trace.emit("request.tokenized", req=request_id, num_tokens=len(token_ids), prompt=text, token_ids=ids)
