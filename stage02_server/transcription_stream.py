"""A transcription as server-sent events (vllm/entrypoints/openai/speech_to_text, _speech_to_text_stream_generator)."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal

import msgspec

from stage02_server.batch import make_usage
from stage02_server.errors import as_reported, error_json
from stage02_server.features.audio.protocol import TranscriptionChoice, TranscriptionChunk, TranscriptionDelta
from stage02_server.middleware import RequestIds
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import AudioInput, EngineCoreRequest
from stage03_engine.outputs import CompletionOutput
from stagetrace import trace

if TYPE_CHECKING:
    import numpy as np

FRAMES_PER_SECOND = 100  # of sound; each counts as a token of the prompt, as in vLLM
SoundRequest = tuple[EngineCoreRequest, "np.ndarray"]  # what is asked, and the piece of sound that it is about


def with_sound(request: EngineCoreRequest, piece: np.ndarray) -> EngineCoreRequest:
    """The request as it goes to the engine: with a copy of the sound, so it is made when its turn comes."""
    return msgspec.structs.replace(request, audio=AudioInput(piece.tobytes()))


class TranscriptionStream:
    """The chunks of one answer. `include_usage` ends them with one that holds the usage, `continuous_usage` puts the usage so
    far into each."""

    def __init__(
        self,
        engine_client: AsyncLLM,
        requests: list[SoundRequest],
        seconds: float,
        ids: RequestIds,
        model: str,
        kind: Literal["transcription.chunk", "translation.chunk"],
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._engine_client, self._requests = engine_client, requests
        self._ids, self._model, self._kind, self._created = ids, model, kind, int(time.time())
        self._include_usage, self._continuous_usage = include_usage, continuous_usage
        prompts = sum(len(request.prompt_token_ids) for request, _ in requests)
        self._num_prompt, self._num_tokens = prompts + math.ceil(seconds * FRAMES_PER_SECOND), 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """A chunk per piece of text; the pieces of sound one after the other, so that the text is in order. Ends behind a
        piece that was aborted: what follows would hide that something is missing."""
        aborted = False
        try:
            for number, request in enumerate(self._requests, start=1):
                async with aclosing(self._engine_client.generate(with_sound(*request))) as outputs:
                    async for output in outputs:
                        aborted = output.outputs[0].finish_reason == "abort"
                        is_last = aborted or number == len(self._requests)
                        yield self._chunk([self._choice(output.outputs[0], is_last)], self._continuous_usage)
                if aborted:
                    break
            if self._include_usage:
                yield self._chunk([], True)
        except Exception as error:
            yield self._event(error_json(as_reported(error, self._ids.response)))
        yield self._event("[DONE]")

    def _choice(self, answer: CompletionOutput, is_last: bool) -> TranscriptionChoice:
        self._num_tokens += len(answer.token_ids)
        reason = answer.finish_reason if is_last else None
        return TranscriptionChoice(delta=TranscriptionDelta(content=answer.text), finish_reason=reason)

    def _chunk(self, choices: list[TranscriptionChoice], with_usage: bool) -> bytes:
        chunk = TranscriptionChunk(
            id=self._ids.response, object=self._kind, created=self._created, model=self._model, choices=choices
        )
        if with_usage:
            chunk.usage = make_usage(self._num_prompt, self._num_tokens)
        return self._event(chunk.model_dump_json(exclude=None if self._include_usage else {"usage"}))

    def _event(self, data: str) -> bytes:
        event = f"data: {data}\n\n".encode()
        if trace.on:
            trace.emit("sse.chunk", req=self._ids.engine_id(0), cause=self._ids.cause, bytes=len(event))
        return event
