"""POST /v1/audio/transcriptions and /translations (vllm/entrypoints/openai/serving_transcription.py, OpenAISpeechToText).

Long audio is cut into pieces of at most 30 seconds. Each is a request of the engine whose prompt is a row of Whisper's own
tokens: which language is spoken, and whether to write it down or to translate it into English.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.util import find_spec
from typing import Literal

from starlette.requests import Request

from stage02_server.errors import as_api_error, error_json
from stage02_server.protocol_audio import (
    AudioUsage,
    TranscriptionChoice,
    TranscriptionChunk,
    TranscriptionDelta,
    TranscriptionRequest,
    TranscriptionResponse,
    read_form,
)
from stage02_server.serving_engine import merge_async_iterators, run_until_disconnect
from stage02_server.serving_models import OpenAIServingModels
from stage02_server.tasks import require_task
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreRequest
from stagetrace import trace

Task = Literal["transcription", "translation"]
DEFAULT_LANGUAGE = "en"  # vLLM's


class ServingTranscription:
    """Speech to text. Raises ConfigError when the server's model listens and what decodes audio is not installed."""

    def __init__(self, engine_client: AsyncLLM, models: OpenAIServingModels) -> None:
        self.engine_client = engine_client
        self.models = models
        if engine_client.vllm_config.is_whisper and find_spec("soundfile") is None:
            raise ConfigError("a Whisper model needs soundfile; install the project with its extra `audio`")

    async def create(
        self, raw_request: Request, task: Task
    ) -> str | TranscriptionResponse | AsyncGenerator[bytes, None]:
        """The text, the JSON around it, or its stream. Raises every refusal before a stream begins."""
        self.engine_client.check_health()
        require_task(self.engine_client.vllm_config, task)
        request, data = await read_form(raw_request)
        model = self.models.check(request.model)
        request.check_built()
        requests, seconds = await asyncio.to_thread(self._requests, request, data, task, raw_request)
        if trace.on:
            ids = raw_request.state.ids
            trace.emit(
                "request.validated", req=ids.engine_id(0), model=model, stream=request.stream, prompts=len(requests)
            )  # fmt: skip
        if request.stream:
            return self._stream(requests, raw_request, model, task)
        text = await run_until_disconnect(raw_request.receive, self._text(requests))
        if request.response_format == "text":
            return text
        return TranscriptionResponse(text=text, usage=AudioUsage(seconds=seconds))

    def _requests(
        self, request: TranscriptionRequest, data: bytes, task: Task, raw_request: Request
    ) -> tuple[list[EngineCoreRequest], int]:
        """One engine request per piece, and the whole length in seconds, rounded up."""
        from stage02_server.audio_input import SAMPLE_RATE, decode_audio, split_audio  # numpy only where it is needed

        params, prompt = request.to_sampling_params(), self._prompt(request, task)
        samples = decode_audio(data)
        requests = []
        for index, piece in enumerate(split_audio(samples)):
            request_id = raw_request.state.ids.engine_id(index)
            made = self.engine_client.input_processor.process_inputs(request_id, prompt, params)
            made.audio = piece.tobytes()
            requests.append(made)
        return requests, -(-len(samples) // SAMPLE_RATE)

    def _prompt(self, request: TranscriptionRequest, task: Task) -> list[int]:
        """What the decoder begins with. Raises InvalidRequestError for a language that the model does not know."""
        tokenizer, language = self.engine_client.tokenizer, request.language or DEFAULT_LANGUAGE
        before: list[int] = []
        if request.prompt:
            room = self.engine_client.vllm_config.max_model_len // 2 - 1  # as Whisper was trained
            before = [self._token("startofprev"), *tokenizer.encode(" " + request.prompt.strip(), False)[-room:]]
        try:
            spoken = self._token(language)
        except InvalidRequestError:
            shown = language if len(language) <= 20 else language[:20] + "..."
            raise InvalidRequestError(
                f"The model does not know the language {shown!r}; give a code such as en.", "language"
            ) from None
        do = "transcribe" if task == "transcription" else "translate"
        return [*before, self._token("startoftranscript"), spoken, self._token(do), self._token("notimestamps")]

    def _token(self, name: str) -> int:
        """The id of one of Whisper's own tokens."""
        ids = self.engine_client.tokenizer.encode(f"<|{name}|>", add_special_tokens=False)
        if len(ids) != 1 or not self.engine_client.tokenizer.is_special(ids[0]):
            raise InvalidRequestError(f"The model's tokenizer has no token <|{name}|>.", "model")
        return ids[0]

    async def _text(self, requests: list[EngineCoreRequest]) -> str:
        texts = [""] * len(requests)
        flows = [self.engine_client.generate(request) for request in requests]
        async with aclosing(merge_async_iterators(flows)) as merged:
            async for index, output in merged:
                texts[index] = output.outputs[0].text
        return "".join(texts).strip()

    async def _stream(
        self, requests: list[EngineCoreRequest], raw_request: Request, model: str, task: Task
    ) -> AsyncGenerator[bytes, None]:
        """A chunk per piece of text; the pieces of sound one after the other, so that the text is in order."""
        ids, created = raw_request.state.ids, int(time.time())
        kind: Literal["transcription.chunk", "translation.chunk"] = (
            "transcription.chunk" if task == "transcription" else "translation.chunk"
        )
        try:
            for request in requests:
                async with aclosing(self.engine_client.generate(request)) as outputs:
                    async for output in outputs:
                        answer = output.outputs[0]
                        last = request is requests[-1]
                        choice = TranscriptionChoice(
                            delta=TranscriptionDelta(content=answer.text),
                            finish_reason=answer.finish_reason if last else None,
                        )
                        chunk = TranscriptionChunk(
                            id=ids.response, object=kind, created=created, model=model, choices=[choice]
                        )
                        yield self._event(chunk.model_dump_json(), raw_request)
        except Exception as error:
            yield self._event(error_json(as_api_error(error)), raw_request)
        yield self._event("[DONE]", raw_request)

    @staticmethod
    def _event(data: str, raw_request: Request) -> bytes:
        event, ids = f"data: {data}\n\n".encode(), raw_request.state.ids
        if trace.on:
            trace.emit("sse.chunk", req=ids.engine_id(0), cause=ids.cause, bytes=len(event))
        return event
