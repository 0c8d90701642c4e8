"""/v1/audio on a real server with a tiny random Whisper, and the way from a file to pieces of sound."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("soundfile")

import numpy as np
import soundfile
from hypothesis import given, settings, strategies as st
from openai import BadRequestError, OpenAI
from server_under_test import InProcessServer, ServerProcess, events
from small_whisper import Reference, sound, whisper_folder

from stage02_server import audio_input
from stage02_server.audio_input import SAMPLE_RATE, decode_audio, resample, split_audio
from stage03_engine.errors import InvalidRequestError

TRANSCRIBE, TRANSLATE = (["startoftranscript", "en", do, "notimestamps"] for do in ("transcribe", "translate"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    server = ServerProcess(str(folder), "--port", "0", "--served-model-name", "whisper")
    yield server.wait_until_ready()
    server.process.terminate()
    assert server.wait() == 0
    modules = server.process.stdout.read().split() if server.process.stdout else []
    assert "fastapi" in modules and not {"torch", "transformers"} & set(modules), "the API process stays light"
    server.close()


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def listen(client: OpenAI, data: bytes, **fields: Any) -> Any:
    return client.audio.transcriptions.create(model="whisper", file=("a.wav", data), **fields)


def test_the_text_is_that_of_transformers(client: OpenAI, reference: Reference) -> None:
    texts = set()
    for seed in range(3):
        data = sound(2 + seed, seed=seed)
        answer = listen(client, data)
        assert answer.text == reference.text(decode_audio(data), TRANSCRIBE).strip()
        assert answer.usage.seconds == 2 + seed
        texts.add(answer.text)
    assert len(texts) > 1, "the model hears nothing"


def test_translation_language_and_prompt_choose_what_the_decoder_begins_with(
    client: OpenAI, reference: Reference
) -> None:
    data = sound(2)
    samples = decode_audio(data)
    german = ["startoftranscript", "de", "transcribe", "notimestamps"]
    translated = client.audio.translations.create(model="whisper", file=("a.wav", data)).text
    texts = [translated, listen(client, data, language="de").text, listen(client, data, prompt="Ja").text]
    wanted = [
        reference.text(samples, TRANSLATE),
        reference.text(samples, german),
        reference.text(samples, TRANSCRIBE, " Ja"),
    ]
    assert texts == [text.strip() for text in wanted] and len(set(texts)) == 3


def test_long_sound_is_heard_in_pieces_and_streamed_in_order(url: str, client: OpenAI, reference: Reference) -> None:
    data = sound(64, rate=8000)
    pieces = split_audio(decode_audio(data))
    assert len(pieces) == 3
    wanted = "".join(reference.text(piece, TRANSCRIBE) for piece in pieces)
    assert listen(client, data).text == wanted.strip()
    answer = httpx.post(url + "/v1/audio/transcriptions", files={"file": data}, data={"stream": "true"}, timeout=30)
    chunks = events(answer.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == wanted
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"} and len(chunks) > 3
    assert [chunk["choices"][0]["finish_reason"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]


def test_a_seed_draws_the_same_text_and_forms_of_the_answer(url: str, client: OpenAI) -> None:
    data = sound(1)
    drawn = [listen(client, data, temperature=1.0, extra_body={"seed": seed}).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert listen(client, data, response_format="text").strip() == listen(client, data).text


IMPOSSIBLE = [
    ({"language": "xx"}, "language"), ({"language": "endoftext|><|en"}, "language"), ({"temperature": "nan"}, "body.temperature"),
    ({"temperature": "3"}, "temperature"), ({"response_format": "srt"}, "body.response_format"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"), ({"max_completion_tokens": "0"}, "max_tokens"),
    ({"seed": "9" * 30}, "body.seed"), ({"stream": "perhaps"}, "body.stream"),
]  # fmt: skip


def test_refusals_name_the_field(url: str, client: OpenAI) -> None:
    def refused(param: str, status: int = 400, **how: Any) -> None:
        answer = httpx.post(url + "/v1/audio/transcriptions", **how)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error

    for fields, param in IMPOSSIBLE:
        refused(param, files={"file": sound(0.1)}, data=fields)
    for garbage in (b"", b"RIFF", b"not a sound", sound(0.0), sound(1)[:40]):
        refused("file", files={"file": garbage})
    refused("file", files={"other": sound(0.1)})
    refused("file", data={"file": "text"})
    refused("file", json={"file": "text"})
    refused("model", 404, files={"file": sound(0.1)}, data={"model": "other"})
    refused("body", content=b"--x\r\nno form", headers={"Content-Type": "multipart/form-data; boundary=x"})
    refused("file", 413, files={"file": bytes(25 * 1024**2 + 1)}, timeout=30)
    with pytest.raises(BadRequestError):
        listen(client, b"noise")
    assert listen(client, sound(0.3)).text


def test_each_model_has_its_own_tasks(url: str, server: InProcessServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
        assert httpx.post(url + path, json=body).status_code == 404
    described = server.request("GET", "/openapi.json").json()["paths"]
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        form = described[path]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["required"] == ["file"] and "language" in form["properties"]
        answer = server.request("POST", path, files={"file": sound(0.1)})
        assert answer.status_code == 404 and "serve a Whisper model" in answer.json()["error"]["message"]


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 100), st.integers(0, 5))
def test_pieces_are_short_and_together_the_whole(seconds: float, seed: int) -> None:
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * SAMPLE_RATE)).astype(np.float32)
    pieces = split_audio(samples)
    assert np.array_equal(np.concatenate(pieces), samples)
    assert all(len(piece) <= 30 * SAMPLE_RATE for piece in pieces)
    assert all(len(piece) >= 29 * SAMPLE_RATE for piece in pieces[:-1])


def test_a_piece_ends_in_silence() -> None:
    samples = np.ones(40 * SAMPLE_RATE, dtype=np.float32)
    quiet = int(29.4 * SAMPLE_RATE)
    samples[quiet : quiet + SAMPLE_RATE // 5] = 0
    assert quiet < len(split_audio(samples)[0]) < quiet + SAMPLE_RATE // 5


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_000])
def test_a_tone_stays_the_same_tone(rate: int) -> None:
    """Three seconds of 440 Hz, faded in and out, are the same function of time at every rate."""

    def tone(rate: int) -> np.ndarray:
        time = np.arange(3 * rate) / rate
        return np.sin(2 * np.pi * 440 * time) * np.sin(np.pi * time / 3) ** 2

    assert np.abs(resample(tone(rate), rate) - tone(SAMPLE_RATE)).max() < 1e-3


@pytest.mark.parametrize(("form", "channels"), [("WAV", 1), ("WAV", 2), ("FLAC", 1), ("OGG", 2), ("MP3", 1)])
def test_formats(form: str, channels: int) -> None:
    samples = decode_audio(sound(1.0, rate=44_100, channels=channels, form=form))
    assert samples.dtype == np.float32 and abs(len(samples) - SAMPLE_RATE) < SAMPLE_RATE * 0.1
    assert 0.2 < np.abs(samples).max() < 0.8


def test_a_small_file_that_decodes_to_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_input, "MAX_SAMPLES", 100_000)
    for channels in (1, 2):
        file = io.BytesIO()
        soundfile.write(file, np.zeros((100_000 // channels, channels)), 8000, format="FLAC")
        assert len(file.getvalue()) < 5000
        assert len(decode_audio(file.getvalue())) == 200_000 // channels
        soundfile.write(file := io.BytesIO(), np.zeros((100_000 // channels + 1, channels)), 8000, format="FLAC")
        with pytest.raises(InvalidRequestError, match="send it in parts"):
            decode_audio(file.getvalue())
