"""Images of a Qwen2-VL, whose tokens depend on their sizes, through every API that takes them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from patience import PATIENCE
from pictures_elsewhere import servers_of
from PIL import Image
from seeing_server import data_url, image_part
from server_under_test import InProcessServer, ServerProcess
from small_llava import picture
from small_qwen2_vl import MAX_PIXELS, MIN_PIXELS, SEEN, UNIT, Reference, qwen2_vl_folder
from tokenizers import Tokenizer

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SHOWN = (picture(1), picture(2, (300, 211)))
TEXT = f"user: Is {SEEN} like {SEEN}? assistant:"  # what the template makes of the parts below
PLACES = (20, 35)  # of the two: 40 x 32 pixels, and 300 x 211 which become 56 x 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_vl_folder(tmp_path_factory.mktemp("qwen2_vl") / "model")


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    return EngineArgs.from_kwargs(model=str(folder))


@pytest.fixture(scope="module")
def serve(config: VllmConfig) -> Iterator[Callable[..., InProcessServer]]:
    yield from servers_of(config, served_model_name=("m",))


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """What transformers answers, in 12 tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = TEXT
    for places in PLACES:
        text = text.replace("<|image_pad|>", "#" * places, 1)
    ids = tokenizer.encode(text.replace("#", "<|image_pad|>"), add_special_tokens=False).ids
    return tokenizer.decode(Reference(folder).tokens(ids, list(SHOWN), 12)).rstrip("\ufffd")


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": texts}], "max_tokens": 4, "temperature": 0} | fields


def refusal(server: InProcessServer, *parts: Any, status: int = 400) -> str:
    response = server.post(CHAT, chat(*parts))
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_real_clients_of_a_whole_server(
    folder: Path, expected: str, start_server: Callable[..., ServerProcess]
) -> None:
    """All APIs, whole and as a stream; the engine in its process, the decoder in its own."""
    server = start_server(str(folder), "--port", "0", "--served-model-name", "m", "--dtype", "float32")
    url = server.wait_until_ready()
    first, second = map(data_url, SHOWN)
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client,
        Anthropic(base_url=url, api_key="none", timeout=PATIENCE) as claude,
    ):
        content: Any = chat("Is ", image_part(SHOWN[0]), " like ", image_part(SHOWN[1]), "?")["messages"]
        same: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 12}
        answer = client.chat.completions.create(messages=content, **same)
        assert (answer.choices[0].message.content or "").rstrip("\ufffd") == expected
        assert answer.usage is not None
        stream = client.chat.completions.create(messages=content, stream=True, **same)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert streamed.rstrip("\ufffd") == expected

        parts: Any = [
            {"type": "input_text", "text": "Is "},
            {"type": "input_image", "image_url": first, "detail": "auto"},
        ]
        parts += [
            {"type": "input_text", "text": " like "},
            {"type": "input_image", "image_url": second, "detail": "auto"},
        ]
        asked: Any = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "?"}]}]
        made = client.responses.create(model="m", input=asked, temperature=0, max_output_tokens=12)
        assert made.output_text.rstrip("\ufffd") == expected

        source = [
            {"type": "base64", "media_type": "image/png", "data": each.partition(",")[2]} for each in (first, second)
        ]
        shown = [{"type": "image", "source": each} for each in source]
        texts = [{"type": "text", "text": text} for text in ("Is ", " like ", "?")]
        said: Any = [{"role": "user", "content": [texts[0], shown[0], texts[1], shown[1], texts[2]]}]
        message = claude.messages.create(model="m", max_tokens=12, messages=said, extra_body={"temperature": 0})
        assert message.content[0].text.rstrip("\ufffd") == expected  # type: ignore[union-attr]
        count = claude.messages.count_tokens(model="m", messages=said).input_tokens
        assert count == message.usage.input_tokens == answer.usage.prompt_tokens


def test_programs_in_python(folder: Path, expected: str) -> None:
    """LLM.chat and LLM.generate, with images of Pillow."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), num_gpu_blocks_override=100) as llm:
        pillow = [{"type": "image_pil", "image_pil": each} for each in SHOWN]
        content: Any = ["Is ", pillow[0], {"type": "text", "text": " like "}, pillow[1], "?"]
        [said] = llm.chat([{"role": "user", "content": content}], greedy)
        [made] = llm.generate({"prompt": TEXT, "multi_modal_data": {"image": list(SHOWN)}}, greedy)
    assert said.outputs[0].text.rstrip("\ufffd") == made.outputs[0].text.rstrip("\ufffd") == expected


def test_the_prompt_has_as_many_places_as_each_image_takes(serve: Callable[..., InProcessServer]) -> None:
    server = serve()
    body = chat("Is ", image_part(SHOWN[0]), " like ", image_part(SHOWN[1]), "?")
    assert server.post(CHAT, body).status_code == 200
    (request,) = server.client.requests  # type: ignore[attr-defined]
    assert tuple(each.length for each in request.task.features) == PLACES


def test_a_template_of_texts_gets_all_three_tokens(serve: Callable[..., InProcessServer]) -> None:
    server = serve(chat_template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert server.post(CHAT, chat("What?", image_part(1))).status_code == 200
    (request,) = server.client.requests  # type: ignore[attr-defined]
    whole = f"[What?\n<|vision_start|>{'<|image_pad|>' * PLACES[0]}<|vision_end|>]"
    assert request.prompt_token_ids == server.engine.tokenizer.encode(whole, False)


def png(width: int, height: int) -> bytes:
    """A file that says it is so large, and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.slow(keep=("(1, 200)", "(2, 2)", "(65, 41)", "(4000, 20)"))
@pytest.mark.parametrize(
    "size", [(1, 1), (2, 2), (1, 200), (200, 1), (16, 16), (64, 40), (65, 41), (4000, 4000), (4000, 20)], ids=str
)
def test_extremes_of_size(size: tuple[int, int], serve: Callable[..., InProcessServer]) -> None:
    """They become what they become in transformers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    server = serve()
    assert server.post(CHAT, chat(image_part(Image.new("RGB", size, (9, 9, 9))))).status_code == 200
    (request,) = server.client.requests  # type: ignore[attr-defined]
    (feature,) = request.task.features
    assert (feature.height, feature.width) == smart_resize(size[1], size[0], UNIT, MIN_PIXELS, MAX_PIXELS)
    assert feature.length == feature.width * feature.height // UNIT**2
    assert len(feature.data) == feature.width * feature.height * 3


@pytest.mark.parametrize(
    "size, why",
    [
        ((201, 1), "image_url: the image of 201 x 1 pixels is more than 200 times as long as it is wide."),
        ((1, 201), "image_url: the image of 1 x 201 pixels is more than 200 times as long as it is wide."),
        ((0, 5), "image_url: the image has no pixels."),
        ((60_000, 60_000), "image_url: the image has 60000 x 60000 pixels; at most 33554432 (--max-image-pixels)."),
        ((4000, 4000), "image_url: the image is broken, and cannot be decoded."),
    ],
    ids=str,
)
def test_what_a_head_may_say(size: tuple[int, int], why: str, serve: Callable[..., InProcessServer]) -> None:
    """Refused in one line, and the next image is decoded."""
    server = serve()
    message = refusal(server, image_part(png(*size)))
    assert message == why or (size == (0, 5) and message.startswith("image_url: the image is "))
    assert server.post(CHAT, chat(image_part(1))).status_code == 200


def test_an_image_that_fills_the_context(folder: Path) -> None:
    """Refused by the head of its file, before anything is decoded."""
    config = EngineArgs.from_kwargs(model=str(folder), max_model_len=PLACES[1] + 1)
    takes = f"of 64 x 40 pixels takes 40 tokens of the prompt; at most {PLACES[1]} (--max-model-len)"
    with contextmanager(servers_of)(config) as serve:
        server = serve()
        assert refusal(server, image_part(png(64, 40))) == f"image_url: the image {takes}."
        assert "maximum context length" in refusal(server, "x", image_part(SHOWN[1]))  # the image alone would fit


def test_each_image_is_held_as_large_as_it_is(serve: Callable[..., InProcessServer]) -> None:
    small, large = Image.new("RGB", (16, 16)), Image.new("RGB", (64, 40))
    size = {image.size: image.width * image.height * 3 for image in (small, large)}
    server = serve(max_held_image_bytes=size[(64, 40)] + size[(16, 16)])
    held = server.client.requests  # type: ignore[attr-defined]
    for _ in range(2):
        assert server.post(CHAT, chat(image_part(large), image_part(small))).status_code == 200
        held.clear()
    assert "(--max-held-image-bytes)" in refusal(server, image_part(large), image_part(large), status=429)
    assert "(--max-held-image-bytes)" in refusal(server, image_part(large), *[image_part(small)] * 2, status=429)
    assert server.post(CHAT, chat(image_part(small), n=5, temperature=1)).status_code == 200
    assert server.app.state.images._held.number == 5 * size[(16, 16)]
    held.clear()
    assert server.post(CHAT, chat(image_part(large), n=2, temperature=1)).status_code == 429
    assert server.app.state.images._held.number == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "video", "video": ["data:image/png;base64,AAAA"]},
        {"type": "image_url", "image_url": {"url": "data:video/mp4;base64,AAAA"}},
    ],
    ids=lambda part: str(part["type"]),
)
def test_videos_are_refused_in_one_line(part: dict[str, Any], serve: Callable[..., InProcessServer]) -> None:
    message = refusal(serve(), "See", part)
    assert "cannot be served; there are image_url, " in message or "does not begin like data:image/png" in message


def test_a_place_that_a_client_writes_itself(serve: Callable[..., InProcessServer]) -> None:
    message = refusal(serve(), "See <|image_pad|> and ", image_part(1))
    assert "for each image: it has 2, and the request brings 1" in message


def test_a_photograph_that_is_turned_has_its_turned_size(serve: Callable[..., InProcessServer]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    picture(3, (40, 24)).save(file, "JPEG", exif=exif)
    server = serve()
    assert server.post(CHAT, chat(image_part(file.getvalue()))).status_code == 200
    (request,) = server.client.requests  # type: ignore[attr-defined]
    assert (request.task.features[0].width, request.task.features[0].height) == (24, 40)
