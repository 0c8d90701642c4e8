"""/v1/audio on a real server with a tiny random Whisper."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from patience import PATIENCE

pytest.importorskip("soundfile")

from openai import BadRequestError, OpenAI
from openai.types.audio import TranscriptionVerbose
from server_under_test import InProcessServer, RecordingEcho, ServerProcess, events
from small_whisper import NUM_TIMES, Reference, decode_audio, sound, whisper_folder
from starlette.requests import Request

from stage02_server.features.audio import serving as serving_transcription
from stage02_server.features.audio.decoder import SoundDecoder
from stage02_server.features.audio.pieces import SAMPLE_RATE, split_audio
from stage02_server.features.audio.protocol import read_form
from stage02_server.streaming import ClientGoneError
from stage03_engine.arg_utils import EngineArgs

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
    assert not [line for line in server.lines if "%|" in line], "progress bars are for terminals"
    server.close()


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def listen(client: OpenAI, data: bytes, **fields: Any) -> Any:
    fields = {"language": "en"} | fields
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
    translated = client.audio.translations.create(
        model="whisper", file=("a.wav", data), extra_body={"language": "en"}
    ).text
    texts = [translated, listen(client, data, language="de").text, listen(client, data, prompt="Ja").text]
    wanted = [
        reference.text(samples, TRANSLATE),
        reference.text(samples, german),
        reference.text(samples, TRANSCRIBE, " Ja"),
    ]
    assert texts == [text.strip() for text in wanted] and len(set(texts)) == 3


@pytest.mark.slow
def test_long_sound_is_heard_in_pieces_and_streamed_in_order(url: str, client: OpenAI, reference: Reference) -> None:
    data = sound(64, rate=8000)
    pieces = split_audio(decode_audio(data))
    assert len(pieces) == 3
    wanted = "".join(reference.text(piece, TRANSCRIBE) for piece in pieces)
    assert listen(client, data).text == wanted.strip()
    answer = httpx.post(
        url + "/v1/audio/transcriptions", files={"file": data}, data={"stream": "true", "language": "en"}
    )
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


def test_the_model_says_which_language_it_hears(client: OpenAI, reference: Reference) -> None:
    for seed in (0, 3):
        data = sound(2, seed=seed)
        language = reference.language(decode_audio(data))
        heard = client.audio.transcriptions.create(
            model="whisper", file=("a.wav", data), response_format="verbose_json"
        )
        assert heard.language == language != "en", "en was the answer before anybody listened"
        told = listen(client, data, language=language, response_format="verbose_json")
        assert heard.segments == told.segments


@dataclass
class Heard:
    """What transformers makes of one window of the sound, as far as it need not be heard again."""

    start: float
    tokens: list[int]
    ends: list[float]
    segments: list[tuple[float, float]]


def windows(reference: Reference, samples: np.ndarray) -> list[Heard]:
    first_time = reference.first_time
    found, start = list[Heard](), 0
    while start < len(samples):
        window = samples[start : start + 30 * SAMPLE_RATE]
        tokens, ends, segments = reference.timed(window)
        tokens = [token for token in tokens if token != reference.model.config.eos_token_id]
        is_time = [token >= first_time for token in tokens]
        pairs = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
        advance = len(window)
        if pairs and is_time[-2:] != [False, True]:
            advance = min(advance, round((tokens[pairs[-1] - 1] - first_time) * 0.02 * SAMPLE_RATE))
            tokens = tokens[: pairs[-1]]
        found.append(Heard(start / SAMPLE_RATE, tokens, ends, segments if pairs else []))
        start += advance
    return found


@pytest.mark.slow
def test_timestamps_are_those_of_transformers(client: OpenAI, reference: Reference) -> None:
    """Token by token, and the times of segments and words that follow from them, window after window."""
    counts = []
    for seed, seconds in ((2, 9), (3, 8.5)):
        data = sound(seconds, seed=seed)
        heard = listen(client, data, response_format="verbose_json", timestamp_granularities=["segment", "word"])
        assert (heard.duration, heard.usage.seconds, heard.language) == (seconds, 9, "en")
        assert TranscriptionVerbose.model_validate(heard.model_dump(), strict=True) == heard, (
            "as OpenAI's client expects"
        )
        assert heard.text == "".join(segment.text for segment in heard.segments).strip()
        assert "".join(word.word for word in heard.words) == heard.text.replace(" ", "")
        assert len(heard.words) >= len(heard.segments) > 1
        starts, ends = set(), set()
        wanted = windows(reference, decode_audio(data))
        for window in wanted:
            mine = [segment for segment in heard.segments if segment.seek == round(window.start * 100)]
            letters = [token for token in window.tokens if token < reference.first_time]
            assert [token for segment in mine for token in segment.tokens] == letters
            if window.segments:
                spans = [(segment.start - window.start, segment.end - window.start) for segment in mine]
                theirs = [min(t, seconds - window.start) for span in window.segments for t in span]
                assert sum(spans, ()) == pytest.approx(theirs)
            places = [i for i, token in enumerate(window.tokens) if token < reference.first_time]
            clipped = [round(window.start + min(t, seconds - window.start), 2) for t in [0.0, *window.ends]]
            starts |= {clipped[i] for i in places}
            ends |= {clipped[i + 1] for i in places}
        assert {round(word.start, 2) for word in heard.words} <= starts
        assert {round(word.end, 2) for word in heard.words} <= ends
        counts.append(len(wanted))
    assert min(counts) == 1 < max(counts), "heard whole, and in parts"


def test_the_other_numbers_of_a_segment(client: OpenAI, reference: Reference) -> None:
    samples = decode_audio(data := sound(9, seed=2))
    prompt = [reference.backend.token_to_id(f"<|{name}|>") for name in ("startoftranscript", "en", "transcribe")]
    tokens, _, _ = reference.timed(samples)
    logprobs = reference.logits(samples, prompt + tokens).log_softmax(dim=-1)
    heard = listen(client, data, response_format="verbose_json")
    assert heard.words is None and [segment.id for segment in heard.segments] == list(range(len(heard.segments)))
    no_speech = float(logprobs[0, reference.backend.token_to_id("<|nospeech|>")].exp())
    place = 0
    for segment in [segment for segment in heard.segments if segment.seek == 0]:
        assert segment.temperature == 0.0 and segment.no_speech_prob == pytest.approx(no_speech, abs=1e-5)
        first = tokens.index(segment.tokens[0], place)
        places = range(first, first + len(segment.tokens))
        mean = sum(float(logprobs[len(prompt) + i - 1, tokens[i]]) for i in places) / len(places)
        assert segment.avg_logprob == pytest.approx(mean, abs=1e-4)
        place = places[-1] + 1
        raw = segment.text.encode()
        assert segment.compression_ratio == pytest.approx(len(raw) / len(zlib.compress(raw)))
    assert place, "at least one"
    only_words = listen(client, data, response_format="verbose_json", timestamp_granularities=["word"])
    assert only_words.segments is None and only_words.words


@pytest.mark.slow
def test_times_go_on_from_window_to_window_and_become_subtitles(client: OpenAI, reference: Reference) -> None:
    data = sound(32, rate=8000)
    wanted = windows(reference, decode_audio(data))
    whole = listen(client, data, response_format="verbose_json")
    assert {s.seek for s in whole.segments} <= {round(window.start * 100) for window in wanted}
    assert len(wanted) > 2 and whole.segments[-1].seek > 2500 and whole.segments[-1].end <= 32
    letters = [token for window in wanted for token in window.tokens if token < reference.first_time]
    assert [token for segment in whole.segments for token in segment.tokens] == letters
    srt, vtt = (listen(client, data, response_format=form) for form in ("srt", "vtt"))
    cues = re.findall(r"(\d+)\n00:(\d\d):(\d\d),(\d{3}) --> 00:(\d\d):(\d\d),(\d{3})\n(.*)\n\n", srt)
    assert [int(cue[0]) for cue in cues] == list(range(1, len(whole.segments) + 1))
    seconds = [(int(m) * 60 + int(s) + int(ms) / 1000) for _, m, s, ms, _, _, _, _ in cues]
    assert seconds == pytest.approx([segment.start for segment in whole.segments])
    assert [cue[-1] for cue in cues] == [" ".join(segment.text.split()) for segment in whole.segments]
    without_numbers = re.sub(r"(?m)^\d+\n", "", srt)
    assert vtt == "WEBVTT\n\n" + re.sub(r"(:\d\d),", r"\1.", without_numbers)


def test_a_stream_counts_its_tokens(url: str) -> None:
    def chunks(**fields: str) -> list[dict[str, Any]]:
        body = {"stream": "true", "language": "en"} | fields
        return events(httpx.post(url + "/v1/audio/transcriptions", files={"file": sound(1.5)}, data=body).text)

    assert all("usage" not in chunk for chunk in chunks())
    *pieces, last = chunks(stream_include_usage="true")
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in pieces)
    usage = last["usage"]
    assert usage["prompt_tokens"] == 4 + 150 and usage["total_tokens"] == 154 + usage["completion_tokens"]
    assert usage["completion_tokens"] == 60 - 4, "to the end of the context"
    *pieces, last = chunks(stream_include_usage="1", stream_continuous_usage_stats="1", max_completion_tokens="3")
    counts = [chunk["usage"]["completion_tokens"] for chunk in pieces]
    assert counts == sorted(set(counts)) and counts[-1] == 3, "a slow reader gets several tokens at once"
    assert last["usage"] == pieces[-1]["usage"]


def test_penalties_change_what_is_written(client: OpenAI) -> None:
    data = sound(2)
    texts = [
        listen(client, data, extra_body=extra).text
        for extra in ({}, {"frequency_penalty": 2}, {"repetition_penalty": 5})
    ]
    assert len(set(texts)) == 3 and len(set(texts[2])) > len(set(texts[0]))


@pytest.mark.parametrize("fields", [{}, {"language": "en"}, {"language": "en", "response_format": "vtt"}], ids=str)
def test_what_was_aborted_is_no_answer(make_server: Any, folder: Path, fields: dict[str, str]) -> None:
    """Without a language it is the question for it that ends."""
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(RecordingEcho(tick_seconds=30, config=config), config=config, server_dev_mode=True)

    async def both() -> httpx.Response:
        headers, files = {"X-Request-Id": "mine"}, {"file": sound(0.1)}
        sent = asyncio.create_task(
            server.send("POST", "/v1/audio/transcriptions", headers=headers, files=files, data=fields)
        )
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        await server.send("POST", "/abort_requests", json={"request_ids": ["trsc-mine"]})
        return await sent

    answer = server.run(both())
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")


def test_two_files_are_decoded_at_a_time_and_one_of_each_client(
    make_server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends many files waits for their own."""
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(RecordingEcho(config=config), config=config)
    busy, seen, meet = [], [], threading.Barrier(2)
    begin = SoundDecoder.begin

    def watched(self: SoundDecoder, data: bytes) -> int:
        busy.append(data)
        meet.wait(PATIENCE)
        seen.append(sorted(busy))
        meet.wait(PATIENCE)
        busy.remove(data)
        return begin(self, sound(0.1))

    monkeypatch.setattr(SoundDecoder, "begin", watched)

    async def send(client: str) -> httpx.Response:
        transport = httpx.ASGITransport(server.app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE) as http:
            files = {"file": client.encode()}
            return await http.post("/v1/audio/transcriptions", files=files, data={"language": "en"})

    async def six() -> list[httpx.Response]:
        return await asyncio.gather(*(send(client) for client in "aaabbb"))

    assert [answer.status_code for answer in server.run(six())] == [200] * 6
    assert seen == [[b"a", b"b"]] * 6


def test_a_long_prompt_is_tokenized_in_a_thread(make_server: Any, folder: Path) -> None:
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(RecordingEcho(config=config), config=config)
    tokenizer, threads = server.engine.tokenizer, dict[int, str]()
    encode = tokenizer.encode

    def noted(text: str, add_special_tokens: bool = True) -> list[int]:
        threads[len(text)] = threading.current_thread().name
        return encode(text, add_special_tokens)

    tokenizer.encode = noted
    for size in (10, 10_000):
        data, files = {"language": "en", "prompt": "a" * size}, {"file": sound(0.1)}
        assert server.request("POST", "/v1/audio/transcriptions", data=data, files=files).status_code == 200
    assert threads[11] == "MainThread" and threads[10_001].startswith("tokenize")


def test_a_model_without_tokens_for_times_is_asked_for_none(make_server: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": shape["vocab_size"] - NUM_TIMES}))
    config = EngineArgs.from_kwargs(model=str(tmp_path))
    server = make_server(RecordingEcho(config=config), config=config)
    for form, status in (("json", 200), ("srt", 400)):
        data = {"language": "en", "response_format": form}
        answer = server.request("POST", "/v1/audio/transcriptions", files={"file": sound(0.1)}, data=data)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "response_format"


class Prompts(RecordingEcho):
    """Remembers what the engine was given."""

    async def add_request_async(self, request: Any) -> None:
        self.prompts = [*getattr(self, "prompts", []), request.prompt_token_ids]
        await super().add_request_async(request)


def test_a_model_for_english_alone_is_told_neither_language_nor_task(
    make_server: Any, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"is_multilingual": False}))
    config = EngineArgs.from_kwargs(model=str(tmp_path))
    server = make_server(Prompts(config=config), config=config)

    def ask(path: str, **data: str) -> httpx.Response:
        return server.request("POST", f"/v1/audio/{path}", files={"file": sound(0.1)}, data=data)

    start, without = settings["decoder_start_token_id"], settings["no_timestamps_token_id"]
    assert ask("transcriptions").status_code == ask("transcriptions", language="en").status_code == 200
    assert server.client.prompts == [[start, without]] * 2
    assert ask("transcriptions", language="de").json()["error"]["param"] == "language"
    assert ask("translations").json()["error"]["param"] == "model"


IMPOSSIBLE = [
    ({"language": "xx"}, "language"), ({"language": "endoftext|><|en"}, "language"), ({"temperature": "nan"}, "body.temperature"),
    ({"temperature": "3"}, "temperature"), ({"response_format": "xml"}, "body.response_format"),
    ({"response_format": "srt", "stream": "true"}, "response_format"), ({"response_format": "verbose_json", "stream": "1"}, "response_format"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
    ({"timestamp_granularities": "segment", "response_format": "srt"}, "timestamp_granularities[]"),
    ({"timestamp_granularities[]": "page", "response_format": "verbose_json"}, "body.timestamp_granularities[]"),
    ({"stream_include_usage": "true"}, "stream_include_usage"), ({"use_beam_search": "true"}, "use_beam_search"),
    ({"stream_continuous_usage_stats": "true"}, "stream_continuous_usage_stats"), ({"frequency_penalty": "inf"}, "body.frequency_penalty"),
    ({"repetition_penalty": "0"}, "repetition_penalty"), ({"to_language": "de"}, "to_language"), ({"max_completion_tokens": "0"}, "max_completion_tokens"),
    ({"max_completion_tokens": "99999"}, "max_completion_tokens"),
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
    refused("file", 413, files={"file": bytes(25 * 1024**2 + 1)})
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


def long_stream(make_server: Any, folder: Path, **flags: Any) -> tuple[InProcessServer, Any]:
    """A server, and a request for a stream about two pieces of sound whose tokens come slowly."""
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(RecordingEcho(tick_seconds=0.02, config=config), config=config, **flags)
    data = {"language": "en", "stream": "true", "max_completion_tokens": "9"}
    headers, files = {"X-Request-Id": "mine"}, {"file": sound(31)}
    return server, server.send("POST", "/v1/audio/transcriptions", headers=headers, files=files, data=data)


def test_a_stream_ends_with_the_piece_that_was_aborted(make_server: Any, folder: Path) -> None:
    """Or else the text would go on behind a hole that nobody can see."""
    server, stream = long_stream(make_server, folder, server_dev_mode=True)

    async def both() -> httpx.Response:
        sent = asyncio.create_task(stream)
        while not server.engine.num_unfinished_requests:
            await asyncio.sleep(0)
        await server.send("POST", "/abort_requests", json={"request_ids": ["trsc-mine"]})
        return await sent

    reasons = [chunk["choices"][0]["finish_reason"] for chunk in events(server.run(both()).text)]
    assert reasons == [None] * (len(reasons) - 1) + ["abort"] and len(server.client.added) == 1


def test_a_stream_that_waits_says_so(make_server: Any, folder: Path) -> None:
    server, stream = long_stream(make_server, folder, sse_keep_alive_interval=0.005)
    text = server.run(stream).text
    assert text.count(": keep-alive\n\n") > 5
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in events(text.replace(": keep-alive\n\n", ""))]
    assert reasons.pop() == "length" and set(reasons) == {None}


def test_what_nobody_expected_is_in_the_log(make_server: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, stream = long_stream(make_server, folder)

    async def fail(_: Any) -> None:
        raise KeyError("inside")

    server.client.add_request_async = fail
    (error,) = events(server.run(stream).text)
    assert error["error"]["code"] == 500 and "inside" not in str(error)
    assert "trsc-mine failed" in caplog.text and "KeyError: 'inside'" in caplog.text


class Crowd(RecordingEcho):
    """Remembers how many requests it had at most."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.finished: set[str] = set()
        self.most = 0

    async def add_request_async(self, request: Any) -> None:
        await super().add_request_async(request)
        self.most = max(self.most, len(set(self.added) - self.finished))

    async def get_output_async(self) -> Any:
        outputs = await super().get_output_async()
        self.finished |= {output.request_id for output in outputs.outputs if output.finish_reason is not None}
        return outputs


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"response_format": "text"}], ids=str)
def test_long_sound_goes_to_the_engine_piece_by_piece(
    make_server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str]
) -> None:
    """Three hours are 360 copies of pieces of two megabytes."""
    monkeypatch.setattr(serving_transcription, "PIECES_AT_ONCE", 2)
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(Crowd(config=config), config=config)
    data = {"language": "en", "max_completion_tokens": "2"} | fields
    answer = server.request("POST", "/v1/audio/transcriptions", files={"file": sound(130)}, data=data)
    assert answer.status_code == 200
    assert len(server.client.added) == 5 and server.client.most == (1 if "stream" in fields else 2)


def test_sound_takes_no_more_memory_than_there_is_room_for(make_server: Any, folder: Path) -> None:
    """A small file can hold hours of silence, and a hundred of them all memory."""
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(
        RecordingEcho(tick_seconds=30, config=config), config=config, max_audio_seconds=20, server_dev_mode=True
    )
    files, path = {"file": sound(15)}, "/v1/audio/transcriptions"

    async def ask(name: str, **fields: str) -> httpx.Response:
        headers = {"X-Request-Id": name}
        return await server.send("POST", path, headers=headers, files=files, data={"language": "en"} | fields)

    async def three(**fields: str) -> list[httpx.Response]:
        """The third comes while the two others are being answered; 15 seconds each, of 40 at most."""
        sent = []
        for name in ("a", "b"):
            sent.append(asyncio.create_task(ask(name, **fields)))
            while server.engine.num_unfinished_requests < len(sent):
                await asyncio.sleep(0)
        late = await ask("c", **fields)
        await server.send("POST", "/abort_requests", json={"request_ids": ["trsc-a", "trsc-b"]})
        return [*await asyncio.gather(*sent), late]

    gc.disable()  # a refused request leaves nothing that only a collection would find
    try:
        for _ in range(3):
            assert server.run(ask("a", max_completion_tokens="99999")).status_code == 400
        for fields in ({}, {"stream": "true"}, {"response_format": "text"}):
            *_, late = server.run(three(**fields))
            assert late.status_code == 429, fields
            assert int(late.headers["retry-after"]) > 0 and late.json()["error"]["type"] == "RateLimitError"
    finally:
        gc.enable()


def test_a_long_upload_lies_on_the_disk_and_a_full_one_is_a_503(
    make_server: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineArgs.from_kwargs(model=str(folder))
    server = make_server(RecordingEcho(config=config), config=config)
    # 1.3 MB, above what stays in memory
    data, files = {"language": "en", "max_completion_tokens": "1"}, {"file": sound(40)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert server.request("POST", "/v1/audio/transcriptions", files=files, data=data).status_code == 200
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    answer = server.request("POST", "/v1/audio/transcriptions", files=files, data=data)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "temporary folder" in line.getMessage() and line.exc_info is None
    short = server.request("POST", "/v1/audio/transcriptions", files={"file": sound(1)}, data=data)
    assert short.status_code == 200


def test_a_client_that_leaves_while_it_uploads_is_no_error() -> None:
    messages = [
        {"type": "http.request", "body": b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n', "more_body": True}
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def check() -> None:
        form = [(b"content-type", b"multipart/form-data; boundary=x")]
        with pytest.raises(ClientGoneError):
            async with read_form(Request({"type": "http", "method": "POST", "headers": form}, receive)):
                pass

    asyncio.run(check())
