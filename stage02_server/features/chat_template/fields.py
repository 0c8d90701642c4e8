"""The request fields that a Jinja chat template gets (vllm/entrypoints/openai/chat_completion/protocol.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from stage02_server.protocol_types import AnswerHook, ListOf, RequestFields, Text

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing


class ChatTemplateKwargs(RequestFields):
    """Plain concatenation ignores them."""

    for_templates: ClassVar[bool] = True

    chat_template: Text | None = Field(
        default=None, description="A Jinja template for this request; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[Text, Any] | None = Field(default=None, description="Variables for the chat template.")
    documents: ListOf[dict[Text, Any]] | None = Field(
        default=None, description="Texts that the chat template may show to the model."
    )
    reasoning_effort: Text | None = Field(
        default=None, description="How much the model should think; the chat template sees it."
    )


class Continuation(RequestFields):
    """Whether the answer continues the last message."""

    for_templates: ClassVar[bool] = True

    add_generation_prompt: bool | None = Field(
        default=True, description="End the prompt with the beginning of an answer."
    )
    continue_final_message: bool | None = Field(default=False, description="The answer continues the last message.")

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Gives the answers the role of the message that they continue."""
        if self.add_generation_prompt is not False:
            return None
        from stage02_server.features.chat_template.continuation import ContinuationHook

        return ContinuationHook(self.messages[-1].role, None)  # type: ignore[attr-defined]
