"""The request fields that ask for token ids and for the prompt as text, and those of the answers that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from stage02_server.protocol_types import AnswerHook, RequestFields

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing
    from stage03_engine.outputs import CompletionOutput


class ReturnTokenIds(RequestFields):
    """In a stream the prompt's come once per answer, with its first chunk."""

    return_token_ids: bool | None = Field(
        default=False, description="Return the token ids of the prompt and the answer."
    )

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts them into the answers."""
        return TokenIdsHook(requests) if self.return_token_ids else None


class ReturnPromptText(RequestFields):
    """Of chats."""

    return_prompt_text: bool | None = Field(
        default=False, description="Return the prompt that the template made of the messages."
    )

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts it beside the choices."""
        return PromptTextHook(prompts[0]) if self.return_prompt_text else None


class TokenIds(BaseModel):
    """Of a choice. Of the answer, without an echoed prompt."""

    token_ids: list[int] | None = Field(default=None, description="The tokens of the answer.")


class PromptTokenIds(BaseModel):
    """Of a choice of a completion, or beside the choices of a chat."""

    prompt_token_ids: list[int] | None = Field(default=None, description="The tokens of the prompt.")


class PromptText(PromptTokenIds):
    """Beside the choices of a chat."""

    prompt_text: str | None = Field(default=None, description="What the chat template made of the messages.")


class TokenIdsHook(AnswerHook):
    """Those of the answer with each choice; those of the prompt once."""

    def __init__(self, requests: EngineRequests) -> None:
        self._requests = requests

    def _prompt(self, index: int) -> list[int]:
        return self._requests.engine_requests[index // self._requests.n].prompt_token_ids

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """A completion has those of the prompt here too."""
        choice.token_ids = output.token_ids
        if first and hasattr(choice, "prompt_token_ids"):
            choice.prompt_token_ids = self._prompt(index)

    def chunk(self, index: int, chunk: Any) -> None:
        """A chat sends those of the prompt with the role."""
        if hasattr(chunk, "prompt_token_ids") and "role" in chunk.choices[0].delta:
            chunk.prompt_token_ids = self._prompt(index)

    def response(self, response: Any) -> None:
        """The whole answer to a chat."""
        if hasattr(response, "prompt_token_ids") and response.choices:
            response.prompt_token_ids = self._prompt(0)


class PromptTextHook(AnswerHook):
    """The prompt of a chat, once."""

    def __init__(self, prompt: Any) -> None:
        self._prompt = prompt

    def chunk(self, index: int, chunk: Any) -> None:
        """With the role."""
        if "role" in chunk.choices[0].delta:
            chunk.prompt_text = self._prompt

    def response(self, response: Any) -> None:
        """The whole answer."""
        if response.choices:
            response.prompt_text = self._prompt
