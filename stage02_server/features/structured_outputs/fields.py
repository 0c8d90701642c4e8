"""The request fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`
(vllm/entrypoints/openai/completion/protocol.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from stage02_server.protocol_types import AnswerHook, ContentKind, ListOf, RequestFields, Text

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing


class RefusalPart(ContentKind):
    """How OpenAI's models say that they will not answer in the form that was asked for; clients send it back in the next turn."""

    refusal: Text | None = Field(default=None, description="The text of a part in which a model refused.")

    def as_text(self) -> str | None:
        """The refusal itself."""
        return self.refusal


class StructuredOutputsFields(RequestFields):
    """What the answer must match. At most one of them may be given."""

    response_format: dict[str, Any] | None = Field(
        default=None,
        description="Text, a JSON object, JSON that follows a schema, or text with tags in it (structural_tag).",
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="One of json, regex, choice, grammar, json_object and structural_tag, which the answer must follow.",
    )
    guided_json: Text | dict[str, Any] | bool | None = Field(
        default=None, description="A JSON schema that the answer must follow."
    )
    guided_regex: Text | None = Field(default=None, description="A regular expression that the answer must match.")
    guided_choice: ListOf[Text] | None = Field(default=None, description="Texts, of which the answer must be one.")
    guided_grammar: Text | None = Field(default=None, description="Rules in GBNF that the answer must follow.")

    def apply(self, params: dict[str, Any]) -> None:
        """Raises InvalidRequestError for a schema or an expression that is not valid, and for two fields at once."""
        from stage02_server.features.structured_outputs.convert import to_structured_outputs

        if (structured := to_structured_outputs(self)) is not None:
            params["structured_outputs"] = structured

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """The engine compiles the grammar, and may refuse it."""
        if not is_structured(requests):
            return None
        from stage02_server.features.structured_outputs.refusal_first import RefusalFirst

        return RefusalFirst()


def is_structured(requests: EngineRequests) -> bool:
    """True if the answers must match something."""
    return getattr(requests.engine_requests[0].sampling_params, "structured_outputs", None) is not None
