"""The form fields and answers of /v1/audio (vllm/entrypoints/openai/protocol.py, TranscriptionRequest)."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, FiniteFloat, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from stage02_server.errors import APIError
from stage02_server.protocol import Int32, Int64, RequestModel, Text
from stage03_engine.errors import InvalidRequestError
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams

MAX_FILE_BYTES = 25 * 1024**2  # OpenAI's number, and vLLM's default
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "chunking_strategy": ("auto", ""),
    "frequency_penalty": ("0", "0.0", ""),
    "hotwords": ("",),
    "include[]": ("",),
    "presence_penalty": ("0", "0.0", ""),
    "repetition_penalty": ("1", "1.0", ""),
    "timestamp_granularities[]": ("",),
}
"""Field that is not built here -> the values that change nothing and are accepted."""


class TranscriptionRequest(RequestModel):
    """POST /v1/audio/transcriptions and /v1/audio/translations, beside the file."""

    language: Text | None = None
    prompt: Text = ""
    response_format: Literal["json", "text"] = "json"
    temperature: FiniteFloat = 0.0
    top_p: FiniteFloat = 1.0
    top_k: Int32 = 0
    min_p: FiniteFloat = 0.0
    seed: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    stream: bool = False

    def check_built(self) -> None:
        """Raises InvalidRequestError for a field that asks for what is not built here."""
        for name, value in (self.model_extra or {}).items():
            if value not in _NOT_BUILT.get(name, (value,)):
                raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name)

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_completion_tokens,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )


class AudioUsage(BaseModel):
    """What is counted is the length of the sound."""

    type: Literal["duration"] = "duration"
    seconds: int


class TranscriptionResponse(BaseModel):
    """The answer with response_format "json"."""

    text: str
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


async def read_form(request: Request) -> tuple[TranscriptionRequest, bytes]:
    """The fields of a multipart body, and the content of its file.

    Raises RequestValidationError, InvalidRequestError, and APIError 413 for a file that is too long.
    """
    try:
        async with request.form(max_files=1, max_fields=64) as form:  # closes the temporary file of a long upload
            return _fields(form), await _content(form)
    except HTTPException as error:
        raise APIError(400, "Bad Request", f"The body is no readable form: {error.detail}", "body") from None


def _fields(form: FormData) -> TranscriptionRequest:
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    try:
        return TranscriptionRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in error.errors()]) from None


async def _content(form: FormData) -> bytes:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError("Send the audio as the file `file` of a multipart/form-data body.", "file")
    if (upload.size or 0) > MAX_FILE_BYTES:
        raise APIError(413, "BadRequestError", f"file must be at most {MAX_FILE_BYTES // 1024**2} MiB.", "file")
    return await upload.read()
