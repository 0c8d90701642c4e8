"""Request fields of sampling that few requests need, and the engine's features that handle them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, FiniteFloat, WrapValidator

from stage02_server.protocol_types import Int32, Int64, ListOf, RequestFields, Text
from stage03_engine.errors import InvalidRequestError

INTEGER = re.compile(r"\s*[+-]?\d{1,19}\s*")  # no vocabulary has longer ids
Scalar = bool | Int64 | FiniteFloat | Text
V = TypeVar("V")
AT_ONCE = 64


def _some_at_once(value: Any, validate: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Validate a few pairs at a time: of 65,536 wrong ones the first few are enough."""
    if not isinstance(value, dict):
        return validate(value)
    pairs, valid = list(value.items()), dict[str, Any]()
    for start in range(0, len(pairs), AT_ONCE):
        valid |= validate(dict(pairs[start : start + AT_ONCE]))
    return valid


MapOf = Annotated[dict[Text, V], WrapValidator(_some_at_once)]

_SAME_NAME = (
    "best_of", "logprob_token_ids", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "allowed_token_ids", "bad_words",
    "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "stream_interval",
)  # fmt: skip
"""Fields that go into `SamplingParams` as they are."""


class SamplingFields(RequestFields):
    """None leaves the default."""

    min_p: FiniteFloat | None = Field(
        default=None,
        description="Sample only tokens with at least this share of the likeliest token's probability.",
    )
    frequency_penalty: FiniteFloat | None = Field(
        default=0.0, description="Lowers a token's logit each time it is used."
    )
    presence_penalty: FiniteFloat | None = Field(default=0.0, description="Lowers the logit of a used token once.")
    repetition_penalty: FiniteFloat | None = Field(
        default=None, description="Above 1: tokens of the prompt and of the answer become less likely."
    )
    logit_bias: MapOf[FiniteFloat] | None = Field(
        default=None,
        description="Maps a token id to a number that is added to its logit; -100 forbids the token, 100 all but forces it.",
    )
    allowed_token_ids: ListOf[Int64] | None = Field(
        default=None, description="The answer may contain only these tokens."
    )
    bad_words: ListOf[Text] | None = Field(default=None, description="Words that the answer must not contain.")
    min_tokens: Int64 | None = Field(default=0, description="The answer has at least this many tokens.")
    stop_token_ids: ListOf[Int64] | None = Field(default=None, description="Tokens that end the answer.")
    include_stop_str_in_output: bool = Field(
        default=False, description="Keep the stop string at the end of the answer."
    )
    ignore_eos: bool = Field(default=False, description="Continue past the end-of-text token.")
    skip_special_tokens: bool | None = Field(
        default=True, description="Leave tokens such as the end of text out of the answer."
    )
    spaces_between_special_tokens: bool | None = Field(default=True, description="Put spaces between special tokens.")
    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = Field(
        default=None, description="Truncate a longer prompt to this many tokens; -1: to the length of the context."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Which side of the prompt is cut off."
    )
    stream_interval: Annotated[Int32, Field(ge=1)] | None = Field(
        default=None, description="Tokens from one chunk of the stream to the next."
    )
    best_of: Int32 | None = Field(default=None, description="Generate this many answers and return the n likeliest.")
    logprob_token_ids: ListOf[Int64] | None = Field(
        default=None,
        description="With logprobs: report the log probabilities of these tokens instead of the likeliest ones.",
    )
    vllm_xargs: MapOf[Scalar | ListOf[Scalar]] | None = Field(
        default=None, description="Values for logits processors of your own."
    )

    def apply(self, params: dict[str, Any]) -> None:
        """Raises InvalidRequestError for sizes and counts that make no sense, and for biases of what is no token id."""
        for name in _SAME_NAME:
            if (value := getattr(self, name)) is not None:
                params[name] = value
        if self.logit_bias is not None:
            params["logit_bias"] = biases_by_id(self.logit_bias)
        if self.vllm_xargs:
            params["extra_args"] = self.vllm_xargs


def biases_by_id(biases: dict[str, float]) -> dict[int, float]:
    """The same with numbers as keys: in JSON a key is a text. Raises InvalidRequestError that names the keys that are no
    integers, ten of them at most."""
    if wrong := [key for key in biases if not INTEGER.fullmatch(key)]:
        shown = ", ".join(repr(key[:40]) for key in wrong[:10]) + ", ..." * (len(wrong) > 10)
        raise InvalidRequestError(f"logit_bias: its keys are token ids, which {shown} cannot be.", "logit_bias")
    return {int(key): bias for key, bias in biases.items()}
