"""The flags of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class LogprobsFlags:
    """How answers name tokens, and how many log-probabilities they hold."""

    return_tokens_as_token_ids: bool = option(
        False, 'in logprobs call tokens "token_id:5" instead of by their text, unless a request says otherwise'
    )
    max_request_logprobs: int = option(
        2097152,
        "most log-probabilities that a request may ask for, over all its prompts and answers (400 beyond); one answer to one prompt is "
        "never refused",
        at_least=1,
    )


FEATURE = Feature(
    name="logprobs",
    help="log-probabilities of the tokens of an answer",
    room=__package__,
    settings={"FrontendArgs": LogprobsFlags},
    parts=(
        Part("request", ".fields:CompletionLogprobs", key="CompletionRequest"),
        Part("request", ".fields:ChatLogprobs", key="ChatCompletionRequest"),
        Part("response", ".fields:CompletionChoiceField", key="CompletionChoice"),
        Part("response", ".fields:ChatChoiceField", key="ChatChoice"),
    ),
    events=("answer.logprobs",),
)
