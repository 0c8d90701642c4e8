"""The shapes of requests (vllm/entrypoints/openai/protocol.py); those of answers are in protocol_response.py.

pydantic checks the form of a request. Fields that it does not know are ignored, as in vLLM, except those in NOT_BUILT:
to ignore one of these would silently give a different answer than the one that was asked for.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, StrictInt
from pydantic_core import PydanticCustomError

from stage02_server.structured_outputs import to_structured_outputs
from stage03_engine.errors import InvalidRequestError
from stage03_engine.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams

MAX_N = 128


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("not_unicode", "Input holds half of a surrogate pair, which is not Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]  # JSON can spell "\ud800" alone; UTF-8, and so the tokenizer, cannot
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # what a tensor of integers can hold
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what msgpack can hold
TokenIds = list[StrictInt]

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True, None),
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": ([], None),
    "best_of": (1, None),
    "cache_salt": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": ({}, None),
    "continue_final_message": (False, None),
    "documents": ([], None),
    "echo": (False, None),
    "frequency_penalty": (0, None),
    "function_call": ("none", None),
    "functions": ([], None),
    "length_penalty": (1, None),
    "logit_bias": ({}, None),
    "logprob_token_ids": (None,),
    "min_tokens": (0, None),
    "modalities": (["text"], None),
    "presence_penalty": (0, None),
    "priority": (0, None),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (1, None),
    "return_token_ids": (False, None),
    "return_tokens_as_token_ids": (False, None),
    "suffix": ("", None),
    "tool_choice": ("none", "auto", None),
    "tools": ([], None),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False, None),
}
"""Field of OpenAI's or vLLM's interface that is not built here -> the values that change nothing and are accepted."""


class RequestModel(BaseModel):
    """A request body. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = None

    def check_built(self) -> None:
        """Raises InvalidRequestError for a field in NOT_BUILT that asks for something."""
        for name, value in (self.model_extra or {}).items():
            if value not in NOT_BUILT.get(name, (value,)):
                raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name)


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingRequest(RequestModel):
    """What completions and chats have in common. None means the default of `SamplingParams`."""

    n: Int32 | None = 1
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Int32 | None = None
    min_p: FiniteFloat | None = None
    seed: Int64 | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Text | dict[str, Any] | bool | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool | None = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        """True when a stream is to end with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True when every chunk of a stream is to hold the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequestError for what is impossible, alone or together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options can only be given together with stream=true.", "stream_options")
        if not 1 <= self.num_choices <= MAX_N:
            raise InvalidRequestError(f"n must be in [1, {MAX_N}], got {self.n}.", "n")
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        params = SamplingParams(
            **{name: value for name, value in chosen.items() if value is not None},
            seed=self.seed,
            max_tokens=max_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
            structured_outputs=to_structured_outputs(self),
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )
        if self.num_choices > 1 and params.greedy:
            raise InvalidRequestError(
                f"n must be 1 when the temperature is 0 (all answers would be equal), got {self.n}.", "n"
            )
        return params


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Text | TokenIds | list[Text] | list[TokenIds]
    max_tokens: Int64 | None = 16
    logprobs: Int32 | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each as text or as token ids. `[]` counts as one empty prompt (and is refused later)."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list):
            return list(self.prompt)
        return [self.prompt]  # type: ignore[list-item]

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        return self._sampling_params(self.max_tokens, self.logprobs)


class ContentPart(BaseModel):
    """One part of a message's content; only type "text" can be served."""

    type: Text
    text: Text | None = None


class ChatMessageParam(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Text | list[ContentPart] | None = None
    name: Text | None = None


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessageParam]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = False
    top_logprobs: Int32 | None = None

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}.", "top_logprobs")
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", "top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling_params(max_tokens, top if self.logprobs else None)


class TokenizeRequest(RequestModel):
    """POST /tokenize: a text, or messages that the chat template turns into one."""

    prompt: Text | None = None
    messages: list[ChatMessageParam] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: TokenIds
