"""What protocol.py and the `fields.py` of the features share: the types of fields, and what a feature may do with its own.

A separate module, because protocol.py composes requests from the features' fields.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, StrictInt, StringConstraints, WithJsonSchema

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.messages import EngineCoreRequest
    from stage03_engine.outputs import CompletionOutput, RequestOutput


# JSON can hold a lone "\ud800"; UTF-8, and so the tokenizer, cannot. pydantic checks this only if there is a constraint.
Text = Annotated[str, StringConstraints(min_length=0), WithJsonSchema({"type": "string"})]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]  # what a tensor of integers can hold
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]  # what msgpack can hold
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]  # one error, not a million
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
Several = Annotated[list[T], Field(max_length=4096, fail_fast=True)]


class RequestFields(BaseModel):
    """Base of what a feature adds to request bodies. A feature is called only if the request sets one of its fields."""

    for_templates: ClassVar[bool] = False  # the fields are read by chat templates
    parser_class: ClassVar[str] = ""  # module:Class that parses the answers

    def apply(self, params: dict[str, Any]) -> None:
        """Change the arguments of SamplingParams. Raises InvalidRequestError."""

    def generate(self, engine: AsyncLLM, request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None] | None:
        """The answers to one prompt, if the feature makes them itself from engine calls."""

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """What the feature adds to the answers. Raises ClientGoneError."""


class ContentKind(BaseModel):
    """A kind of part of a message's content: its fields, which become fields of ContentPart, and what stands for it in the prompt."""

    def as_text(self) -> str | None:
        """What the chat template sees of a part of this kind; None if the part lacks its field. May raise InvalidRequestError."""


class AnswerHook:
    """What a feature adds to the answers to one HTTP request."""

    async def begin(self, outputs: AsyncGenerator[T, None], receive: Receive) -> AsyncGenerator[T, None]:
        """The outputs of a stream, before its first byte is sent: a refusal can still set the HTTP status."""
        return outputs

    def output(self, prompt: int, output: RequestOutput) -> None:
        """The engine's next output for a prompt; it may be changed."""

    def choice(self, index: int, choice: Any, output: CompletionOutput, first: bool) -> None:
        """Answer `index`, or the next piece of it, as a part of the response; `first` if nothing came before."""

    def chunk(self, index: int, chunk: Any) -> None:
        """A chunk of a stream, which belongs to answer `index`."""

    def response(self, response: Any) -> None:
        """The whole response, or the chunk of a stream that holds the usage."""
