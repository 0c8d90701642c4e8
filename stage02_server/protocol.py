"""The shapes of requests (vllm/entrypoints/openai/protocol.py); those of answers are in protocol_response.py.

pydantic checks the form of a request. Fields that it does not know are ignored, as in vLLM, except those in NOT_BUILT:
to ignore one of these would silently give a different answer than the one that was asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from stage02_server.features.hardening.request_limits import check_number_of_items
from stage02_server.features.structured_outputs import to_structured_outputs
from stage02_server.features.tools.fields import MAX_TOOLS, ToolChoice, ToolParam
from stage02_server.features.tools.tool_choice import with_forced_tool
from stage02_server.middleware import ACCEPTED_ID
from stage02_server.protocol_types import Int32, Int64, Several, Text, TokenIds
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.beam_search import BeamSearchParams
from stage03_engine.params.repetition_detection import RepetitionDetectionParams
from stage03_engine.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "ec_transfer_params": ({}, None),
    "function_call": ("none", None),
    "functions": ([], None),
    "kv_transfer_params": ({}, None),
    "media_io_kwargs": ({}, None),
    "mm_processor_kwargs": ({}, None),
    "modalities": (["text"], None),
    "prompt_embeds": (None,),
    "return_mm_kwargs": (False, None),
    "return_token_offsets": (False, None),
    "return_weight_versions": (False, None),
    "routed_experts_prompt_start": (0, None),
    "suffix": ("", None),
    "thinking_token_budget": (None,),
    "verbosity": ("medium", None),
    "watermarking": (False, None),
    "web_search_options": (None,),
}
"""Field of OpenAI's or vLLM's interface that is not built here -> the values that change nothing and are accepted."""

_SAME_NAME = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "min_tokens", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "logprob_token_ids", "prompt_logprobs", "stream_interval",
)  # fmt: skip
"""Fields that go into `SamplingParams` as they are; None means the default there."""

_NOT_WITH_BEAM_SEARCH = (
    "stream", "best_of", "logprob_token_ids", "prompt_logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "stop", "stop_token_ids",
    "repetition_detection",
)  # fmt: skip


class RequestModel(BaseModel):
    """A request body. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, body: Any) -> Any:
        """Before pydantic looks at each item, and has something to say about each. Raises APIError."""
        if isinstance(body, dict):
            check_number_of_items(body)
        return body

    def check_built(self) -> None:
        """Raises InvalidRequestError for a field in NOT_BUILT that asks for something."""
        for name, value in (self.model_extra or {}).items():
            if value not in NOT_BUILT.get(name, (value,)):
                raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name)


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


Scalar = bool | Int64 | FiniteFloat | Text
RequestId = Annotated[str, Field(pattern=f"^{ACCEPTED_ID.pattern}$")]


class RepetitionDetection(BaseModel):
    """When an output that repeats itself ends; see stage03_engine/params/repetition_detection.py."""

    max_pattern_size: Int32 = 0
    min_pattern_size: Int32 = 0
    min_count: Int32 = 0

    def to_params(self) -> RepetitionDetectionParams:
        """Raises InvalidRequestError."""
        return RepetitionDetectionParams(self.max_pattern_size, self.min_pattern_size, self.min_count)


class SamplingRequest(RequestModel):
    """What completions and chats have in common. None means the default of `SamplingParams`."""

    n: Int32 | None = 1
    use_beam_search: bool | None = False
    length_penalty: FiniteFloat | None = 1.0
    early_stopping: bool | None = False
    best_of: Int32 | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Int32 | None = None
    min_p: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = 0.0
    presence_penalty: FiniteFloat | None = 0.0
    repetition_penalty: FiniteFloat | None = None
    logit_bias: dict[Int64, FiniteFloat] | None = None
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[Text] | None = None
    repetition_detection: RepetitionDetection | None = None
    seed: Int64 | None = None
    min_tokens: Int64 | None = 0
    logprob_token_ids: list[Int64] | None = None
    prompt_logprobs: Int32 | None = None
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
    spaces_between_special_tokens: bool | None = True
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None  # None: as --return-tokens-as-token-ids says
    return_token_ids: bool | None = False
    vllm_xargs: dict[Text, Scalar | list[Scalar]] | None = None
    request_id: RequestId | None = None  # becomes a part of the answer's id; the header X-Request-Id goes first
    stream: bool | None = False
    stream_interval: Int32 | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    priority: Int32 = 0
    cache_salt: Text | None = None

    @property
    def include_usage(self) -> bool:
        """True when a stream is to end with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """True when every chunk of a stream that reports usage is to hold the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def fill_in(self, defaults: dict[str, Any]) -> None:
        """Take what the request leaves open from `defaults`, by field; not with beam search, which draws nothing."""
        for name, value in defaults.items():
            if not self.use_beam_search and name != "max_tokens" and getattr(self, name) is None:
                setattr(self, name, value)

    def _beam_search_params(self, max_tokens: int | None, logprobs: int | None) -> BeamSearchParams:
        """What only matters when tokens are drawn (temperature, top_k, ..., seed) is ignored, as in vLLM; what would change
        the answer is refused."""
        unknown = {name: getattr(self, name) for name in _NOT_WITH_BEAM_SEARCH} | {"logprobs": logprobs}
        for name, value in unknown.items():
            if not (value is None or value is False or value == getattr(SamplingParams(), name, None)):
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search.", name)
        if to_structured_outputs(self) is not None:
            raise InvalidRequestError("Structured output cannot be combined with use_beam_search.", "use_beam_search")
        return BeamSearchParams(
            beam_width=1 if self.n is None else self.n,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=bool(self.early_stopping),
            skip_special_tokens=self.skip_special_tokens is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams | BeamSearchParams:
        """Raises InvalidRequestError for what is impossible, alone or together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options can only be given together with stream=true.", "stream_options")
        if self.use_beam_search:
            return self._beam_search_params(max_tokens, logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be given in a stream.", "prompt_logprobs")
        chosen = {name: getattr(self, name) for name in _SAME_NAME}
        return SamplingParams(
            **{name: value for name, value in chosen.items() if value is not None},
            max_tokens=max_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            logprobs=logprobs,
            repetition_detection=None if self.repetition_detection is None else self.repetition_detection.to_params(),
            extra_args=self.vllm_xargs or {},
            structured_outputs=to_structured_outputs(self),
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Text | TokenIds | Several[Text] | Several[TokenIds]
    max_tokens: Int64 | None = 16
    logprobs: Int32 | None = None
    echo: bool | None = False
    add_special_tokens: bool = True  # such as the beginning-of-text token, where the model's tokenizer has one

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each as text or as token ids. `[]` counts as one empty prompt (and is refused later)."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list):
            return list(self.prompt)
        return [self.prompt]  # type: ignore[list-item]

    @property
    def prompt_only(self) -> bool:
        """True when the answer is to be the prompt and nothing else: what evaluation harnesses send to score texts."""
        return bool(self.echo) and self.max_tokens == 0

    def to_sampling_params(self) -> SamplingParams | BeamSearchParams:
        """Raises InvalidRequestError. The engine cannot draw no token at all, so with `prompt_only` it is to draw one."""
        params = self._sampling_params(1 if self.prompt_only else self.max_tokens, self.logprobs)
        if not self.echo or self.logprobs is None or isinstance(params, BeamSearchParams):
            return params
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))


class ContentPart(BaseModel):
    """One part of a message's content; only text can be served."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    thinking: Text | None = None


class MessageFunctionCall(BaseModel):
    """What an earlier answer called: `arguments` is JSON in a text."""

    name: Text
    arguments: Text | None = None


class MessageToolCall(BaseModel):
    """A tool call of an earlier answer."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: MessageFunctionCall


class ChatMessageParam(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Text | list[ContentPart | Text] | None = None
    name: Text | None = None
    tool_calls: list[MessageToolCall] | None = None  # of role assistant
    tool_call_id: Text | None = None  # of role tool: which call this is the result of
    reasoning: Text | None = None  # of role assistant
    reasoning_content: Text | None = None  # its older name


class ChatTemplateFields(BaseModel):
    """What the chat template is told besides the messages."""

    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: Text | None = None  # instead of the server's; off unless --trust-request-chat-template
    chat_template_kwargs: dict[Text, Any] | None = None  # further variables for the template
    documents: list[dict[Text, Any]] | None = None
    reasoning_effort: Text | None = None
    tools: list[ToolParam] | None = Field(default=None, max_length=MAX_TOOLS)


class ChatCompletionRequest(SamplingRequest, ChatTemplateFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessageParam], Field(fail_fast=True)]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    tool_choice: ToolChoice | None = None  # None: "auto" if there are tools
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    echo: bool | None = False  # begin the answer with the last message, if it has the answer's role
    logprobs: bool | None = False
    top_logprobs: Int32 | None = None
    return_prompt_text: bool | None = False  # what the template made of the messages
    add_special_tokens: bool | None = None  # None: templates write them, a chat without a template gets them

    def to_sampling_params(self) -> SamplingParams | BeamSearchParams:
        """Raises InvalidRequestError."""
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}.", "top_logprobs")
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", "top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self._sampling_params(max_tokens, top if self.logprobs else None)
        return with_forced_tool(params, self.tools or [], self.tool_choice, self.parallel_tool_calls is not False)


class TokenizeRequest(RequestModel, ChatTemplateFields):
    """POST /tokenize: a text, or messages that the chat template turns into one."""

    prompt: Text | None = None
    messages: list[ChatMessageParam] | None = None
    add_special_tokens: bool | None = None  # None: with a prompt yes, with messages as in a chat
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: TokenIds
