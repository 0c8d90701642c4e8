"""POST /v1/audio/transcriptions and /translations (vllm/entrypoints/speech_to_text/base/serving.py, OpenAISpeechToText).

Long audio is cut into pieces of at most 30 seconds. Each is a request of the engine whose prompt is a row of Whisper's own
tokens: which language is spoken, whether to write it down or to translate it into English, and whether to say when.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.requests import Request

from stage02_server.api_server import Services
from stage02_server.errors import as_reported, error_json
from stage02_server.features.audio.decoder import SoundDecoders
from stage02_server.features.audio.pieces import SAMPLE_RATE, split_audio
from stage02_server.features.audio.protocol import (
    AudioUsage,
    TranscriptionChoice,
    TranscriptionChunk,
    TranscriptionDelta,
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionVerbose,
    read_form,
)
from stage02_server.features.audio.transcript import Piece, Transcript, to_srt, to_vtt
from stage02_server.features.several_prompts.collect import collect
from stage02_server.middleware import TENANT, RequestIds
from stage02_server.serving_engine import make_usage, require_task
from stage02_server.streaming import in_thread_if_long, run_until_disconnect, server_sent_event
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.outputs import CompletionOutput
from stage03_engine.params.audio import AudioInput
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import trace

if TYPE_CHECKING:
    import numpy as np

Task = Literal["transcription", "translation"]
Answer = str | TranscriptionResponse | TranscriptionVerbose | AsyncGenerator[bytes, None]
ENGLISH = "en"
LONGEST = 30 * SAMPLE_RATE  # of what the model hears at once
PIECES_AT_ONCE = 16  # that the engine has of one request: each is a copy of up to 2 MB
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


class ServingTranscription:
    """Speech to text. Raises ConfigError if the model transcribes and the audio decoder is not installed."""

    def __init__(self, services: Services) -> None:
        self.engine_client, self.models, self.args = services.engine, services.models, services.args
        self.added = services.added
        self._decoders = SoundDecoders(self.args.max_audio_seconds)
        special, config = self.engine_client.tokenizer.special_tokens(), self.engine_client.vllm_config
        named = {_LANGUAGE.fullmatch(text): token for text, token in special.items()}
        # English-only models have tokens for other languages too, but were never trained on them.
        self._languages = {match[1]: token for match, token in named.items() if match and config.shape.multilingual}
        if config.is_whisper and find_spec("soundfile") is None:
            raise ConfigError("a Whisper model needs soundfile; install the project with its extra `audio`")

    async def create(self, raw_request: Request, task: Task) -> Answer:
        """The text, the JSON around it, or its stream. Raises every refusal before a stream begins."""
        self.engine_client.check_health()
        require_task(self.engine_client.vllm_config, task, "serve a Whisper model")
        address, key = raw_request.client.host if raw_request.client else "", TENANT.get()
        client = address if key is None else f"key {key}"
        with self._decoders.upload(client):
            async with read_form(raw_request) as (request, upload):
                model = self.models.check(request.model)
                request.check()
                params = request.to_sampling_params()
                language = self._spoken(request, task)
                samples = await run_until_disconnect(raw_request.receive, self._decoders.decode(client, upload.read))
        pieces = split_audio(samples)
        ids, first = raw_request.state.ids, 0
        if trace.on:
            trace.emit(
                "request.validated", req=ids.engine_id(0), model=model, stream=request.stream, prompts=len(pieces)
            )  # fmt: skip
        if language is None:
            detected = self._detect_language(pieces[0], ids.engine_id(0))
            language, first = await run_until_disconnect(raw_request.receive, detected), 1
        prompt = partial(self._prompt, request, language, task)
        ask = partial(
            self._request, await in_thread_if_long([request.prompt], raw_request.receive, prompt), params, ids
        )
        if request.timed:
            timed = self._timed(request, ask, samples, language, task, first)
            return await run_until_disconnect(raw_request.receive, timed)
        requests = [ask(index, piece) for index, piece in enumerate(pieces, start=first)]
        seconds = len(samples) / SAMPLE_RATE
        if request.stream:
            usage = request.stream_include_usage or getattr(self.args, "enable_force_include_usage", False)
            stream = TranscriptionStream(
                self.engine_client, requests, seconds, ids, model,
                "transcription.chunk" if task == "transcription" else "translation.chunk",
                usage, usage and request.stream_continuous_usage_stats,
            )  # fmt: skip
            return stream.events()
        text = await run_until_disconnect(raw_request.receive, self._text(requests))
        if request.response_format == "text":
            return text
        return TranscriptionResponse(text=text, usage=_audio_usage(seconds))

    def _spoken(self, request: TranscriptionRequest, task: Task) -> str | None:
        """The language that the request names; None if the model is to detect it. Raises InvalidRequestError for one that the
        model does not know, and for a translation by a model that knows English only."""
        if not self._languages and task == "translation":
            raise InvalidRequestError("This model knows English only; it cannot translate.", "model")
        language = request.language or (None if self._languages else ENGLISH)
        if language is not None and language not in (self._languages or (ENGLISH,)):
            shown = language if len(language) <= 20 else language[:20] + "..."
            raise InvalidRequestError(
                f"The model does not know the language {shown!r}; give a code such as en.", "language"
            )
        return language

    async def _detect_language(self, piece: np.ndarray, request_id: str) -> str:
        """The language that the model detects in the piece: the likeliest first token of all language tokens."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=list(self._languages.values()),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        start = [self._token("startoftranscript")]
        request = self.engine_client.input_processor.process_inputs(request_id, start, params)
        request.task = AudioInput(piece.tobytes())
        (output,) = await collect(self.engine_client, [request])
        language = next(name for name, token in self._languages.items() if token == output.outputs[0].token_ids[0])
        if trace.on:
            trace.emit("request.language_detected", req=request_id, language=language)
        return language

    def _request(
        self, prompt: list[int], params: SamplingParams, ids: RequestIds, index: int, piece: np.ndarray
    ) -> SoundRequest:
        """The engine request number `index`, about a piece. Raises InvalidRequestError."""
        made = self.engine_client.input_processor.process_inputs(ids.engine_id(index), prompt, params)
        for log in self.added.log:
            log(made, prompt)
        return made, piece

    async def _text(self, requests: list[SoundRequest]) -> str:
        """What is said in all pieces. Raises APIError 503."""
        texts = []
        for begin in range(0, len(requests), PIECES_AT_ONCE):
            heard = [with_sound(*each) for each in requests[begin : begin + PIECES_AT_ONCE]]
            texts += [output.outputs[0].text for output in await collect(self.engine_client, heard)]
        return "".join(texts).strip()

    def _prompt(self, request: TranscriptionRequest, language: str, task: Task) -> list[int]:
        """The tokens that the decoder begins with."""
        tokenizer = self.engine_client.tokenizer
        before: list[int] = []
        if request.prompt:
            room = self.engine_client.vllm_config.max_model_len // 2 - 1  # as Whisper was trained
            before = [self._token("startofprev"), *tokenizer.encode(" " + request.prompt.strip(), False)[-room:]]
        do = "transcribe" if task == "transcription" else "translate"
        what = [self._languages[language], self._token(do)] if self._languages else []
        when = [] if request.timed else [self._token("notimestamps")]
        return [*before, self._token("startoftranscript"), *what, *when]

    def _token(self, name: str) -> int:
        """The id of one of Whisper's own tokens."""
        ids = self.engine_client.tokenizer.encode(f"<|{name}|>", add_special_tokens=False)
        if len(ids) != 1 or not self.engine_client.tokenizer.is_special(ids[0]):
            raise InvalidRequestError(f"The model's tokenizer has no token <|{name}|>.", "model")
        return ids[0]

    def _timestamps_from(self) -> int:
        """The id of the token for 0.00 seconds: those for times are the last of the vocabulary, whether the tokenizer knows
        them or not."""
        token = self._token("notimestamps") + 1
        if token >= self.engine_client.vllm_config.shape.vocab_size:
            raise InvalidRequestError(
                "This model has no tokens for timestamps; use response_format json or text.", "response_format"
            )
        return token

    async def _timed(
        self,
        request: TranscriptionRequest,
        ask: Callable[[int, np.ndarray], SoundRequest],
        samples: np.ndarray,
        language: str,
        task: Task,
        first: int,
    ) -> str | TranscriptionVerbose:
        """Piece by piece, each from where the last whole segment ended: what was cut off is heard again."""
        timestamps_from = self._timestamps_from()
        transcript = Transcript(self.engine_client.tokenizer, timestamps_from, request.temperature, language)
        start, index = 0, first
        while start < len(samples):
            piece = samples[start : start + LONGEST]
            made = with_sound(*ask(index, piece))
            made.task.timestamps_from, made.task.word_timestamps = timestamps_from, request.wants_words
            (output,) = await collect(self.engine_client, [made])
            heard = transcript.add(output, Piece(start / SAMPLE_RATE, len(piece) / SAMPLE_RATE))
            start, index = start + max(1, round(heard * SAMPLE_RATE)), index + 1
        if request.response_format != "verbose_json":
            return (to_srt if request.response_format == "srt" else to_vtt)(transcript.segments)
        seconds = len(samples) / SAMPLE_RATE
        return TranscriptionVerbose(
            task="transcribe" if task == "transcription" else "translate",
            language=language,
            duration=seconds,
            text=transcript.text,
            segments=transcript.segments if request.wants_segments else None,
            words=transcript.words if request.wants_words else None,
            usage=_audio_usage(seconds),
        )


def _audio_usage(seconds: float) -> AudioUsage:
    return AudioUsage(seconds=math.ceil(seconds))


FRAMES_PER_SECOND = 100  # of sound; each counts as a token of the prompt, as in vLLM
SoundRequest = tuple[EngineCoreRequest, "np.ndarray"]  # what is asked, and the piece of sound that it is about


def with_sound(request: EngineCoreRequest, piece: np.ndarray) -> EngineCoreRequest:
    """The request as it goes to the engine: with a copy of the sound, so it is made when its turn comes."""
    return msgspec.structs.replace(request, task=AudioInput(piece.tobytes()))


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
        """A chunk per piece of text; the pieces of sound one after the other, so that the text is in order. Ends after a
        piece that was aborted: what follows would hide that something is missing."""
        aborted = False
        try:
            for number, request in enumerate(self._requests, start=1):
                made = with_sound(*request)
                flow = self._engine_client.generate(made, made.sampling_params, made.request_id)
                async with aclosing(flow) as outputs:
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
        event = server_sent_event(data.encode())
        if trace.on:
            trace.emit("sse.chunk", req=self._ids.engine_id(0), cause=self._ids.cause, bytes=len(event))
        return event
