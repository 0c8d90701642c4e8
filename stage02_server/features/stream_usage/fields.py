"""The request field `stream_options`: the number of tokens in streams (vllm/entrypoints/generate/base/protocol.py, StreamOptions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from stage02_server.protocol_types import AnswerHook, RequestFields
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    model_config = ConfigDict(extra="allow")  # ignored, but counted as given

    include_usage: bool | None = Field(default=False, description="End the stream with the number of tokens.")
    continuous_usage_stats: bool | None = Field(
        default=False, description="Report the number of tokens in every chunk."
    )


class StreamUsageFields(RequestFields):
    """`continuous_usage_stats` has no effect in a stream that does not end with the usage."""

    stream_options: StreamOptions | None = Field(default=None, description="What a stream reports besides the text.")

    def apply(self, params: dict[str, Any]) -> None:
        """Raises InvalidRequestError for options without a stream. `{}` asks for nothing, and is fine without one."""
        given = self.stream_options is not None and self.stream_options.model_fields_set
        if given and not getattr(self, "stream", False):
            raise InvalidRequestError("stream_options can only be given together with stream=true.", "stream_options")

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Puts the usage so far into every chunk, if that was asked for."""
        options = self.stream_options or StreamOptions()
        requests.ends_with_usage = bool(requests.ends_with_usage or options.include_usage)
        return ContinuousUsage(requests) if requests.ends_with_usage and options.continuous_usage_stats else None


class ContinuousUsage(AnswerHook):
    """Each chunk has the usage of its own answer."""

    def __init__(self, requests: EngineRequests) -> None:
        self._requests = requests

    def chunk(self, index: int, chunk: Any) -> None:
        """The usage so far; a chat's first chunk says who speaks, and comes before any token."""
        requests, speaks = self._requests, "role" in getattr(chunk.choices[0], "delta", ())
        chunk.usage = requests.usage_of([index // requests.n], 0 if speaks else requests.num_tokens[index])
