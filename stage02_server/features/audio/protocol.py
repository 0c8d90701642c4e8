"""The form fields and answers of /v1/audio (vllm/entrypoints/speech_to_text/transcription/protocol.py, TranscriptionRequest)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from stage02_server.errors import APIError, unavailable
from stage02_server.protocol import RequestModel
from stage02_server.protocol_response import UsageInfo
from stage02_server.protocol_types import Int32, Int64, Text
from stage02_server.streaming import ClientGoneError
from stage03_engine.errors import InvalidRequestError
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 25 * 1024**2  # OpenAI's number, and vLLM's default


class TranscriptionRequest(RequestModel):
    """POST /v1/audio/transcriptions and /v1/audio/translations, beside the file."""

    refused: ClassVar[str] = "audio"

    language: Text | None = Field(
        default=None, description="The language that is spoken, such as en; the model says it if not given."
    )
    prompt: Text = Field(
        default="", description="A text, a list of token ids, or a list of either: each is a prompt of its own."
    )
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = Field(
        default="json", description="Text, a JSON object, or JSON that follows a schema."
    )
    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default=[],
        alias="timestamp_granularities[]",
        description="segment, word, or both: which time stamps verbose_json contains.",
    )
    temperature: FiniteFloat = Field(
        default=0.0, description="0 takes the likeliest token each time; higher values draw more freely."
    )
    top_p: FiniteFloat = Field(
        default=1.0, description="Draw only from the likeliest tokens that together have this probability."
    )
    top_k: Int32 = Field(default=0, description="Draw only from so many of the likeliest tokens; 0 and -1 take all.")
    min_p: FiniteFloat = Field(
        default=0.0,
        description="Sample only tokens with at least this share of the likeliest token's probability.",
    )
    frequency_penalty: FiniteFloat = Field(
        default=0.0, description="Above 0: a token becomes less likely each time that the answer has it."
    )
    presence_penalty: FiniteFloat = Field(
        default=0.0, description="Above 0: a token becomes less likely once the answer has it."
    )
    repetition_penalty: FiniteFloat = Field(
        default=1.0, description="Above 1: tokens of the prompt and of the answer become less likely."
    )
    seed: Int64 | None = Field(
        default=None, description="The same seed gives the same answer, whatever else the server does."
    )
    max_completion_tokens: Int64 | None = Field(default=None, description="OpenAI's newer name of max_tokens.")
    stream: bool = Field(
        default=False, description="Send the answer piece by piece while it is made, as server-sent events."
    )
    stream_include_usage: bool = Field(default=False, description="End the stream with the usage.")
    stream_continuous_usage_stats: bool = Field(default=False, description="Tell the usage in every chunk.")

    @property
    def timed(self) -> bool:
        """True when the answer says when something was said."""
        return self.response_format in ("srt", "verbose_json", "vtt")

    @property
    def wants_words(self) -> bool:
        """True when it also says when each word was said."""
        return "word" in self.timestamp_granularities

    @property
    def wants_segments(self) -> bool:
        """False when only words were asked for."""
        return "segment" in self.timestamp_granularities or not self.wants_words

    def check(self) -> None:
        """Raises InvalidRequestError for fields that exclude each other, and for what is not built here."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequestError(
                "timestamp_granularities[] can only be given together with response_format=verbose_json.",
                "timestamp_granularities[]",
            )
        if self.timed and self.stream:
            raise InvalidRequestError(
                f"response_format {self.response_format} cannot be streamed; use json or text.", "response_format"
            )
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise InvalidRequestError(f"{name} can only be given together with stream=true.", name)
        self.check_built()

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logprobs=0 if self.timed else None,  # of the text itself, for the average
            max_tokens=self.max_completion_tokens,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )


def in_words_of_audio(error: InvalidRequestError) -> InvalidRequestError:
    """The same refusal about the field that the client sent: forms call max_tokens max_completion_tokens."""
    if error.param != "max_tokens":
        return error
    return InvalidRequestError(str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens")


class AudioUsage(BaseModel):
    """What is counted is the length of the sound."""

    type: Literal["duration"] = "duration"
    seconds: int


class TranscriptionResponse(BaseModel):
    """The answer with response_format "json"."""

    text: str
    usage: AudioUsage


class TranscriptionSegment(BaseModel):
    """Something that was said, from `start` to `end` seconds. `seek` is where its piece of sound begins, in 0.01 seconds;
    `tokens` are those of the text."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float  # bytes of the text by those of its zlib form: much above 2 means that it repeats itself
    no_speech_prob: float


class TranscriptionWord(BaseModel):
    """One word, from `start` to `end` seconds."""

    word: str
    start: float
    end: float


class TranscriptionVerbose(BaseModel):
    """The answer with response_format "verbose_json"."""

    task: Literal["transcribe", "translate"]
    language: str  # its code, such as "en"
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None
    words: list[TranscriptionWord] | None
    usage: AudioUsage


class TranscriptionDelta(BaseModel):
    """What a chunk adds to the text."""

    content: str


class TranscriptionChoice(BaseModel):
    """The one answer."""

    delta: TranscriptionDelta
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TranscriptionChunk(BaseModel):
    """One chunk of a stream, in vLLM's form."""

    id: str
    object: Literal["transcription.chunk", "translation.chunk"]
    created: int
    model: str
    choices: list[TranscriptionChoice]
    usage: UsageInfo | None = None


@asynccontextmanager
async def read_form(request: Request) -> AsyncIterator[tuple[TranscriptionRequest, UploadFile]]:
    """The fields of a multipart body, and its file, which may lie on the disk until the `async with` block ends.

    Raises RequestValidationError, InvalidRequestError, and APIError: 413 for a file that is too long, 503 if the disk has no
    room for it. Raises ClientGoneError if the client leaves before all is there.
    """
    try:
        form = await request.form(max_files=1, max_fields=64)
    except HTTPException as error:
        if error.status_code != 400:  # the body is too long
            raise
        raise APIError(400, "Bad Request", f"The body is no readable form: {error.detail}", "body") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    except OSError as error:
        logger.warning("an upload cannot be written to the temporary folder: %s", error.strerror or error)
        raise unavailable("The server has no room for uploads at the moment.") from None
    try:
        yield _fields(form), _upload(form)
    finally:
        with suppress(OSError):  # a full disk, again
            await form.close()


def _fields(form: FormData) -> TranscriptionRequest:
    fields: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
    name = "timestamp_granularities"  # the one list: a form repeats the field
    fields.pop(name, None)
    fields[f"{name}[]"] = [value for value in form.getlist(name) + form.getlist(f"{name}[]") if value != ""]
    try:
        return TranscriptionRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in error.errors()]) from None


def _upload(form: FormData) -> UploadFile:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError("Send the audio as the file `file` of a multipart/form-data body.", "file")
    if (upload.size or 0) > MAX_FILE_BYTES:
        raise APIError(413, "BadRequestError", f"file must be at most {MAX_FILE_BYTES // 1024**2} MiB.", "file")
    return upload
