"""The field `echo` of a completion: its answers begin with the prompt. Evaluation harnesses use it with max_tokens 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from stage02_server.protocol_types import AnswerHook, RequestFields

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.protocol import ChatMessageParam
    from stage02_server.serving_engine import EngineRequests, OpenAIServing


class EchoFields(RequestFields):
    """Repeat the prompt."""

    echo: bool | None = Field(default=False, description="The answer begins with the prompt.")

    def apply(self, params: dict[str, Any]) -> None:
        """Ask for the prompt's logprobs too. The engine always generates at least one token: with max_tokens 0 that
        one is hidden."""
        if not self.echo:
            return
        if params["max_tokens"] == 0:
            params["max_tokens"] = 1
        if (logprobs := params.get("logprobs")) is not None:
            params["prompt_logprobs"] = max(logprobs, params.get("prompt_logprobs") or 0)

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts the prompts into the answers."""
        if not self.echo:
            return None
        from stage02_server.features.echo.answer import make_echo_hook

        return await make_echo_hook(self, serving, requests, prompts, receive)


class EchoedMessage(RequestFields):
    """Whether an answer repeats the message that it continues."""

    echo: bool | None = Field(  # if the last message has the answer's role
        default=False, description="With continue_final_message: the answer begins with that message's text."
    )

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Begins the answers with the last message, if that has their role."""
        last: ChatMessageParam = self.messages[-1]  # type: ignore[attr-defined]
        goes_on = getattr(self, "add_generation_prompt", True) is False
        role = last.role if goes_on else serving.args.response_role
        if not self.echo or last.role != role:
            return None
        from stage02_server.features.chat_template.continuation import ContinuationHook

        return ContinuationHook(role, last)
