"""The routes about sound (vllm/entrypoints/speech_to_text/transcription/api_router.py)."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.responses import PlainTextResponse

from stage02_server.api_server import Services
from stage02_server.features.audio.protocol import TranscriptionRequest, in_words_of_audio
from stage02_server.features.audio.serving import ServingTranscription, Task
from stage02_server.streaming import Answer, ClientGoneError, answer_of
from stage03_engine.errors import InvalidRequestError

router = APIRouter()

_schema = TranscriptionRequest.model_json_schema()
_schema["properties"] |= {
    "file": {"type": "string", "format": "binary", "description": "The sound: WAV, FLAC, OGG or MP3."}
}
_schema["required"] = ["file"]
# The handlers read the form themselves, after the check for the task, so it is described here.
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _schema}}}}


async def _create(raw_request: Request, task: Task) -> Response:
    try:
        result = await raw_request.app.state.serving_transcription.create(raw_request, task)
    except ClientGoneError:
        return Response(status_code=499)
    except InvalidRequestError as error:
        raise in_words_of_audio(error) from error
    return PlainTextResponse(result) if isinstance(result, str) else await answer_of(_as_it_is(result))


async def _as_it_is(result: Answer) -> Answer:
    return result


@router.post("/v1/audio/transcriptions", openapi_extra=FORM)
async def create_transcriptions(raw_request: Request) -> Response:
    """Write down what is said in a sound file."""
    return await _create(raw_request, "transcription")


@router.post("/v1/audio/translations", openapi_extra=FORM)
async def create_translations(raw_request: Request) -> Response:
    """Write down in English what is said in a sound file."""
    return await _create(raw_request, "translation")


def install(app: FastAPI, services: Services) -> None:
    """Add the routes and their handler. Raises ConfigError if the audio decoder is not installed."""
    app.state.serving_transcription = ServingTranscription(services)
    app.include_router(router)
