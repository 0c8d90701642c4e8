"""Images in chats: what becomes of them, how many and how large they may be, and where they may come from."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from patience import PATIENCE, wait_until
from pictures_elsewhere import (
    FAILING,
    MOST_BYTES,
    READABLE,
    UNREADABLE,
    Files,
    config,
    folder,
    folder_of_files,
    serve,
    server_of,
    serving_files,
)  # fmt: skip
from seeing_server import data_url, image_part as image
from server_under_test import InProcessServer, ServerProcess
from small_llava import PLACES, SIDE, encoded, picture

from stage02_server.features.images import fetch as fetch_module, serving as serving_module
from stage02_server.features.images.decode import FORMATS, prepared
from stage02_server.features.images.fetch import MediaFetcher, is_public
from stage02_server.features.images.manifest import ImageFlags
from stage02_server.features.images.serving import MOST_COPIES
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.multimodal.llava import read_processor
from stage03_engine.multimodal.manifest import DEFAULT_LIMIT, MultiModalConfig
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY
from stage03_engine.params.multimodal import MultiModalInputs

__all__ = ["config", "folder", "serve"]  # fixtures
ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
LIMITS = (1 << 20, 1 << 20, 1 << 20)  # bytes, pixels, tokens


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0} | fields


def refusal(server: InProcessServer, body: dict[str, Any], status: int = 400) -> str:
    response = server.post(CHAT, body)
    error = response.json()["error"]
    assert response.status_code == status and "\n" not in error["message"], error
    message: str = error["message"]
    return message


# What is made of a file


@pytest.mark.slow(keep=("PNG-(40, 30)", "JPEG-(7, 90)", "GIF-(25, 24)", "WEBP-(5, 5)"))
@pytest.mark.parametrize("size", [(40, 30), (30, 40), (24, 24), (5, 5), (7, 90), (200, 24), (25, 24)], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_a_file_is_prepared_as_transformers_does(
    form: str, size: tuple[int, int], config: VllmConfig, folder: Path
) -> None:
    from io import BytesIO

    from PIL import Image
    from transformers import AutoImageProcessor

    file, vision = encoded(picture(3, size), form), config.shape.vision
    assert vision is not None
    seen, values = prepared(file, *LIMITS, MULTIMODAL_REGISTRY.info(config.shape)), vision.processor.values
    assert (seen.file_width, seen.file_height) == size
    ours = torch.frombuffer(bytearray(seen.data), dtype=torch.uint8).view(SIDE, SIDE, 3).float()
    ours = (ours * values.scale - torch.tensor(values.mean)) / torch.tensor(values.std)
    processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
    theirs = processor(Image.open(BytesIO(file)).convert("RGB"), return_tensors="pt").pixel_values[0]
    assert torch.allclose(ours.permute(2, 0, 1), theirs, atol=1e-5)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "I;16", "CMYK", "YCbCr", "RGBA", "LA", "PA"])
def test_every_mode_of_a_picture(mode: str, config: VllmConfig) -> None:
    form = {"CMYK": "JPEG", "YCbCr": "JPEG"}.get(mode, "PNG")
    if mode == "PA":  # PNG keeps a palette with one transparent colour
        from PIL import Image

        palette = Image.new("P", (30, 30), 1)
        palette.putpalette([255, 0, 0, 0, 0, 0])
        palette.info["transparency"] = 1
        made = palette
    else:
        made = picture(3).convert("L").convert("I;16") if mode == "I;16" else picture(3, mode=mode)
    if mode in ("RGBA", "LA"):
        made.putalpha(0)
    data = prepared(encoded(made, form), *LIMITS, MULTIMODAL_REGISTRY.info(config.shape)).data
    assert len(data) == SIDE * SIDE * 3
    if mode in ("RGBA", "LA", "PA"):  # what is transparent is white
        assert set(data) == {255}


def test_a_photograph_stands_upright(config: VllmConfig) -> None:
    """Cameras write it as the sensor lay, and say how to turn it."""
    from PIL import Image

    turned = picture(3, (40, 30)).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    import io

    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    plain = encoded(picture(3, (40, 30)), "PNG")
    both = [prepared(each, *LIMITS, MULTIMODAL_REGISTRY.info(config.shape)).data for each in (file.getvalue(), plain)]
    assert both[0] == both[1]


def test_of_an_animation_the_first_picture(config: VllmConfig) -> None:
    import io

    for form in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        more = {"lossless": True} if form == "WEBP" else {}
        picture(1).save(file, form, save_all=True, append_images=[picture(2)], **more)
        first = prepared(file.getvalue(), *LIMITS, MULTIMODAL_REGISTRY.info(config.shape)).data
        alone = io.BytesIO()
        picture(1).save(alone, form, **more)
        assert first == prepared(alone.getvalue(), *LIMITS, MULTIMODAL_REGISTRY.info(config.shape)).data


# From the body to the engine


def test_the_engine_gets_the_pictures_and_a_prompt_with_places(
    serve: Callable[..., InProcessServer], config: VllmConfig
) -> None:
    server = serve()
    body = chat({"type": "text", "text": "Is "}, image(1), {"type": "text", "text": " like "}, image(2, detail="low"))
    answer = server.post(CHAT, body).json()
    (request,) = server.client.requests  # type: ignore[attr-defined]
    assert isinstance(request.task, MultiModalInputs)
    token = config.shape.image_token
    assert request.prompt_token_ids.count(token) == 2 * PLACES == sum(each.length for each in request.task.features)
    for number, feature in enumerate(request.task.features, start=1):
        assert set(request.prompt_token_ids[feature.offset : feature.offset + PLACES]) == {token}
        assert feature.data == prepared(encoded(picture(number)), *LIMITS, MULTIMODAL_REGISTRY.info(config.shape)).data
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    text = f"user: Is {'<image>' * PLACES} like {'<image>' * PLACES} assistant:"
    assert request.prompt_token_ids == server.engine.tokenizer.encode(text, False)


def test_the_template_of_a_string_has_images_too(serve: Callable[..., InProcessServer]) -> None:
    server = serve(chat_template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    server.post(CHAT, chat("What?", image(1)))
    (request,) = server.client.requests  # type: ignore[attr-defined]
    assert request.prompt_token_ids == server.engine.tokenizer.encode(f"[What?\n{'<image>' * PLACES}]", False)


def test_an_answer_does_not_continue_an_image(serve: Callable[..., InProcessServer]) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    server = serve()
    assert "which continue_final_message is to continue" in refusal(server, chat("What?", image(1), **fields))
    assert server.post(CHAT, chat(image(1), "What?", **fields)).status_code == 200


def test_an_address_may_be_a_plain_text(serve: Callable[..., InProcessServer]) -> None:
    server = serve()
    part = {"type": "image_url", "image_url": data_url(encoded(picture(1)))}
    assert server.post(CHAT, chat(part)).status_code == 200


def test_a_chat_without_images_starts_no_decoder(config: VllmConfig) -> None:
    with closing(server_of(config)) as server:
        assert server.post(CHAT, chat("Only words")).status_code == 200
        handler = server.app.state.openai_serving_chat
        assert handler._loader.decoder._child.process is None


# What is refused


def test_a_model_of_text_alone_says_so(server: InProcessServer) -> None:
    assert "this is not a multimodal model" in refusal(server, chat("What?", image(1)))


def test_without_pillow_it_does_not_start(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install the project with its extra `images`"):
        server_of(config)


@pytest.mark.parametrize("path", ["/tokenize"])
def test_other_routes_take_no_images(path: str, serve: Callable[..., InProcessServer]) -> None:
    response = serve().post(path, chat(image(1)))
    assert response.status_code == 400 and "leave the image out" in response.json()["error"]["message"]


def test_how_many(serve: Callable[..., InProcessServer]) -> None:
    server = serve()
    message = refusal(server, chat(*[image(1)] * (DEFAULT_LIMIT + 1)))
    assert (
        message
        == f"At most {DEFAULT_LIMIT} image(s) may be provided in one prompt, got {DEFAULT_LIMIT + 1} (--limit-mm-per-prompt)."
    )
    assert server.post(CHAT, chat(*[image(1)] * DEFAULT_LIMIT)).status_code == 200
    none = serve(limit_mm_per_prompt={"image": 0})
    assert "At most 0 image(s)" in refusal(none, chat(image(1)))
    two = serve(limit_mm_per_prompt={"image": 2, "video": 0})
    assert two.post(CHAT, chat(image(1), image(2))).status_code == 200
    assert "At most 2 image(s)" in refusal(two, {"messages": [{"role": "user", "content": [image(1)]}] * 3})


@pytest.mark.parametrize(
    "given", [{"video": 1}, {"image": -1}, {"image": True}, {"image": "2"}, {"image": 1.5}], ids=str
)
def test_a_limit_that_is_none_is_refused_at_start(given: dict[str, Any], serve: Callable[..., InProcessServer]) -> None:
    with pytest.raises(ConfigError, match="^limit_mm_per_prompt: "):
        serve(limit_mm_per_prompt=given)


@pytest.mark.parametrize("given", ["https://example.org", "example.org/", "example.org:443"])
def test_a_domain_that_is_an_address_is_refused_at_start(given: str, serve: Callable[..., InProcessServer]) -> None:
    with pytest.raises(ConfigError, match="^allowed_media_domains: .* is not a host name"):
        serve(allowed_media_domains=("example.net", given))


def test_answers_times_images(serve: Callable[..., InProcessServer]) -> None:
    fields = {"n": MOST_COPIES, "temperature": 1}
    server = serve()
    assert server.post(CHAT, chat(image(1), **fields)).status_code == 200
    assert f"at most {MOST_COPIES}" in refusal(server, chat(image(1), image(2), **fields))
    assert "beams see no images" in refusal(server, chat(image(1), use_beam_search=True, n=2))


def test_how_many_bytes(serve: Callable[..., InProcessServer]) -> None:
    file = encoded(picture(1))
    assert serve(max_image_bytes=len(file)).post(CHAT, chat(image(file))).status_code == 200
    assert "(--max-image-bytes)" in refusal(serve(max_image_bytes=len(file) - 1), chat(image(file)))


def test_how_many_pixels(serve: Callable[..., InProcessServer]) -> None:
    assert serve(max_image_pixels=1200).post(CHAT, chat(image(1))).status_code == 200  # 40 x 30
    message = refusal(serve(max_image_pixels=1199), chat(image(1)))
    assert message == "image_url: the image has 40 x 30 pixels; at most 1199 (--max-image-pixels)."


def test_a_long_thin_one_would_grow(serve: Callable[..., InProcessServer]) -> None:
    message = refusal(serve(max_image_pixels=30_000), chat(image(encoded(picture(1, (1, 2000))))))
    assert f"of 1 x 2000 pixels would be resized to {SIDE} x {2000 * SIDE}" in message


def test_how_much_all_requests_hold(serve: Callable[..., InProcessServer]) -> None:
    size = SIDE * SIDE * 3
    server = serve(max_held_image_bytes=2 * size - 1)
    handler = server.app.state.openai_serving_chat
    for _ in range(3):  # each is let go
        assert server.post(CHAT, chat(image(1))).status_code == 200
        server.client.requests.clear()  # type: ignore[attr-defined]
        server.client.requests = []  # type: ignore[attr-defined]
    response = server.post(CHAT, chat(image(1), image(2)))
    assert response.status_code == 429 and "Retry-After" in response.headers
    assert "(--max-held-image-bytes)" in response.json()["error"]["message"]
    assert server.post(CHAT, chat(image(1), n=2, temperature=1)).status_code == 429, "each answer has its own"
    assert handler._held.number in (0, size)  # the last request may still be in some frame
    refusal(server, chat(image(b"broken")))
    assert handler._held.number in (0, size), "a refused image is still counted"


def test_one_key_leaves_room_for_the_others(serve: Callable[..., InProcessServer]) -> None:
    server = serve(max_held_image_bytes=4 * SIDE * SIDE * 3, api_key=("a", "b"))

    def status(key: str, count: int) -> int:
        body = chat(*(image(number) for number in range(count)))
        return server.post(CHAT, body, headers={"Authorization": f"Bearer {key}"}).status_code

    held = server.client.requests  # type: ignore[attr-defined]
    assert [status("a", 1), status("a", 1), status("a", 1), status("b", 1)] == [200, 200, 429, 200]
    held.clear()
    assert status("a", 3) == 200, "a request that comes alone may hold more than half"


WATCHED_DECODER = """
import os
from pathlib import Path
from stage02_server.features.images.decoder import ImageDecoder
decode, ask, folder = ImageDecoder._decode, ImageDecoder.decode, Path({folder!r})
def note(name, data):
    with open(folder / name, "a") as file:
        print(len(data), file=file)
def held(self, data):
    note("decoded", data)
    os.close(os.open(folder / "go on", os.O_RDONLY))  # waits until the test holds the other end of the pipe
    return decode(self, data)
async def asked(self, data):
    decoding = ask(self, data)
    note("asked", data)
    return await decoding
ImageDecoder._decode, ImageDecoder.decode = held, asked
"""


def test_addresses_take_turns_at_the_decoder(
    folder: Path, tmp_path: Path, start_server: Callable[..., ServerProcess], request: pytest.FixtureRequest
) -> None:
    """Without keys: the one picture of an address does not wait for the twelve of another."""
    os.mkfifo(tmp_path / "go on")
    patch = WATCHED_DECODER.format(folder=str(tmp_path))
    server = start_server(str(folder), "--host", "127.0.0.1", "--port", "0", "--device", "cpu", patch=patch)
    url = server.wait_until_ready()
    small, large = chat(image(1)), chat(image(encoded(picture(2, (90, 90)))))

    def client(address: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=url, timeout=PATIENCE, transport=httpx.AsyncHTTPTransport(local_address=address)
        )

    async def until_asked(count: int) -> None:
        asked = tmp_path / "asked"
        there = lambda: asked.exists() and asked.read_text().count("\n") >= count  # noqa: E731
        await asyncio.to_thread(wait_until, there, "the decoder is not asked")

    async def life() -> list[int]:
        async with client("127.0.0.1") as many, client("127.0.0.2") as one:
            posts = [asyncio.create_task(many.post(CHAT, json=small)) for _ in range(12)]
            await until_asked(12)
            posts.append(asyncio.create_task(one.post(CHAT, json=large)))
            await until_asked(13)
            request.addfinalizer(partial(os.close, os.open(tmp_path / "go on", os.O_RDWR)))
            return [(await each).status_code for each in posts]

    assert asyncio.run(asyncio.wait_for(life(), PATIENCE)) == [200] * 13
    lengths = [int(line) for line in (tmp_path / "decoded").read_text().split()]
    assert lengths.index(max(lengths)) <= 2, lengths  # after the one that is decoded, and one turn of the other


BAD_URLS = {
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png,abc",
    "another kind": "data:text/plain;base64,YWJj",
    "not base64": "data:image/png;base64,%%%",
    "nothing": "data:image/png;base64,",
    "text": "data:image/png;base64,YWJjZGVm",
    "empty": "",
    "a file": "file:///etc/passwd",
    "ftp": "ftp://example.org/a.png",
    "no scheme": "//example.org/a.png",
    "a bad port": "http://example.org:99999/",
    "a bad host": "http://[::1/",
    "remote": "https://example.org/a.png",
}


@pytest.mark.parametrize("url", BAD_URLS.values(), ids=BAD_URLS)
def test_addresses_that_are_refused(url: str, serve: Callable[..., InProcessServer]) -> None:
    assert refusal(serve(), chat(at(url))).startswith("image_url: the image ")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("part", [0.05, 0.3, 0.6, 0.9])
def test_a_file_that_ends_early_is_refused(
    form: str, part: float, serve: Callable[..., InProcessServer], server: InProcessServer
) -> None:
    file = encoded(picture(1, (200, 150)), form)
    message = refusal(serve(), chat(image(file[: int(len(file) * part)])))
    assert message.startswith("image_url: the image is ")


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "ICO", "PCX", "TGA"])
def test_other_formats_are_not_even_tried(form: str, serve: Callable[..., InProcessServer]) -> None:
    assert "is not a PNG, JPEG, WEBP or GIF" in refusal(serve(), chat(image(encoded(picture(1), form))))


# From other servers


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
    "2002:7f00:1::", "2001:0:1::1", "2001:db8::1", "192.0.2.1", "198.18.0.1", "240.0.0.1",
    "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "fec0::1", "5f00::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_what_is_public(address: str) -> None:
    assert is_public(address)


@pytest.fixture
def files() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(host:port, what it was asked)."""
    with serving_files() as serving:
        yield serving


@pytest.fixture
def all_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "is_public", lambda address: True)


def test_a_picture_of_another_server(files: Any, serve: Callable[..., InProcessServer], all_public: None) -> None:
    address, asked = files
    server = serve(allowed_media_domains=("LOCALHOST",))
    response = server.post(CHAT, chat(at(f"http://{address}/picture?size=1")))
    assert response.status_code == 200, response.text
    assert asked == [("/picture?size=1", address)]
    (request,) = server.client.requests  # type: ignore[attr-defined]
    assert len(request.task.features) == 1


@pytest.mark.parametrize("path", FAILING)
def test_what_another_server_may_do(
    path: str, files: Any, serve: Callable[..., InProcessServer], all_public: None
) -> None:
    address, asked = files
    server = serve(allowed_media_domains=("localhost",), max_image_bytes=1 << 20)
    assert FAILING[path] in refusal(server, chat(at(f"http://{address}{path}")))
    assert asked == [(path, address)]


def test_another_server_may_be_silent(files: Any, serve: Callable[..., InProcessServer], all_public: None) -> None:
    server = serve(allowed_media_domains=("localhost",), media_fetch_seconds=1)
    assert "took longer than 1 seconds" in refusal(server, chat(at(f"http://{files[0]}/silent")))


def test_nobody_may_be_there(serve: Callable[..., InProcessServer], all_public: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = serve(allowed_media_domains=("localhost",))
        assert "its server does not answer" in refusal(server, chat(at(f"http://localhost:{free.getsockname()[1]}/")))


def test_an_address_within_is_not_asked(files: Any, serve: Callable[..., InProcessServer]) -> None:
    """Though its host is allowed: what the name means may have changed."""
    address, asked = files
    server = serve(allowed_media_domains=("localhost", "127.0.0.1"))
    for host in (address, address.replace("localhost", "127.0.0.1")):
        assert "an address that is not public" in refusal(server, chat(at(f"http://{host}/picture")))
    assert not asked


def test_one_address_within_is_enough(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was looked at is what is connected to: the name is asked for once."""
    address, asked = files
    lookups = list[str]()

    async def fetch(*addresses: str) -> bytes:
        loop = asyncio.get_running_loop()

        async def answers(host: str, port: int, **more: Any) -> list[Any]:
            lookups.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(loop), "getaddrinfo", lambda self, *args, **more: answers(*args, **more))
            return await MediaFetcher(["name.example"], 5, 1 << 20).fetch(
                f"http://name.example:{address.partition(':')[2]}/picture", "me"
            )

    with pytest.raises(InvalidRequestError, match="not public"):
        asyncio.run(fetch("8.8.8.8", "127.0.0.1"))
    assert not asked
    monkeypatch.setattr(fetch_module, "is_public", lambda address: True)
    lookups.clear()
    assert asyncio.run(fetch("127.0.0.1")) == Files.file
    assert set(lookups) <= {"name.example", "127.0.0.1"} and lookups.count("name.example") == 1
    assert asked == [("/picture", f"name.example:{address.partition(':')[2]}")]


@pytest.mark.parametrize(
    "url", ["http://example.org/", "http://localhost@example.org/", "http://a@localhost/", "http://localhost.example.org/", "http://xlocalhost/"]
)  # fmt: skip
def test_other_hosts_are_not_asked(url: str, serve: Callable[..., InProcessServer]) -> None:
    assert "must come from one of localhost (--allowed-media-domains)" in refusal(
        serve(allowed_media_domains=("localhost",)), chat(at(url))
    )


@pytest.mark.parametrize("path", ["/\x01", "/\x7f", "/" + "a" * 70_000, "?\x00", "/#\x1f", "/ä", "/%", "/\ud800"], ids=lambda path: ascii(path[:9]))  # fmt: skip
def test_odd_addresses_of_a_host_that_is_allowed(
    path: str, serve: Callable[..., InProcessServer], all_public: None
) -> None:
    server = serve(allowed_media_domains=("localhost",))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        body = json.dumps(chat(at(f"http://localhost:{free.getsockname()[1]}{path}")))
        response = server.request("POST", CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text


# From this machine


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_files(tmp_path_factory.mktemp("above"))


@pytest.fixture(scope="module")
def link(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(media)
    return link


@pytest.mark.parametrize("how", READABLE)
@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_file_below_the_folder(
    through: str, how: str, media: Path, link: Path, serve: Callable[..., InProcessServer]
) -> None:
    """The operator may name the folder by a link, and the client as the operator does, or as it is."""
    named = media if through == "itself" else link
    server = serve(allowed_local_media_path=str(named))
    for as_said in {media, named}:
        response = server.post(CHAT, chat(at(READABLE[how](as_said))))
        assert response.status_code == 200, response.text
    assert all(len(each.task.features) == 1 for each in server.client.requests)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def with_media(media: Path, config: VllmConfig) -> Iterator[InProcessServer]:
    made = server_of(config, allowed_local_media_path=str(media), max_image_bytes=MOST_BYTES)
    with closing(made) as server:
        yield server


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_not_read_of_this_machine(what: str, media: Path, with_media: InProcessServer) -> None:
    """And the answer does not tell where the folder is."""
    url, why = UNREADABLE[what]
    body = json.dumps(chat(at(url(media))))
    response = with_media.request("POST", CHAT, content=body, headers={"Content-Type": "application/json"})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "\n" not in message, response.text
    if what != "half a character":  # which is refused before it is an address
        assert why in message
    assert str(media) not in message and not with_media.client.requests  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [None, ""])
def test_no_file_is_read_unless_a_folder_is_named(
    given: str | None, media: Path, serve: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by a server that was started in that folder."""
    monkeypatch.chdir(media)
    server = serve(allowed_local_media_path=given, allowed_media_domains=("localhost",))
    for url in READABLE.values():
        assert "no file is read here (see --allowed-local-media-path)" in refusal(server, chat(at(url(media))))


def test_a_file_that_grows_while_it_is_read(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is no promise."""
    from stage02_server.features.images import files as files_module

    size = (media / "a.png").stat().st_size
    monkeypatch.setattr(files_module.LocalFiles, "_check", lambda self, found: None)
    with pytest.raises(InvalidRequestError, match="at most"):
        files_module.LocalFiles(str(media), size - 1).read(f"file://{media}/a.png")


def test_a_link_that_is_put_there_meanwhile_is_not_followed(media: Path, tmp_path: Path) -> None:
    """Between the look at the file and its opening."""
    from stage02_server.features.images import files as files_module

    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a.png").write_bytes(encoded(picture(1)))

    class Swapped(files_module.LocalFiles):
        def _check(self, found: os.stat_result) -> None:
            super()._check(found)
            (folder / "a.png").unlink(missing_ok=True)
            (folder / "a.png").symlink_to(media / "a.png")

    with pytest.raises(InvalidRequestError, match="is not there, or cannot be read"):
        Swapped(str(folder), MOST_BYTES).read(f"file://{folder}/a.png")


@pytest.mark.parametrize("given", ["/nowhere/at all", __file__])
def test_a_folder_that_is_none_is_refused_at_start(given: str, serve: Callable[..., InProcessServer]) -> None:
    with pytest.raises(ConfigError, match="^allowed_local_media_path: .* is not a folder on this machine"):
        serve(allowed_local_media_path=given)


# What reads the files of a model


def processor_of(folder: Path, tmp_path: Path, **changed: Any) -> Any:
    from stage03_engine.hf_config import Config

    given = json.loads((folder / "preprocessor_config.json").read_text()) | changed
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return read_processor(Config(tmp_path / "config.json"), SIDE)


@pytest.mark.parametrize(
    "changed",
    [
        {"size": {"shortest_edge": SIDE + 1}, "do_center_crop": False},
        {"crop_size": {"height": SIDE, "width": SIDE - 1}},
        {"crop_size": 7},
        {"size": {"longest_edge": 3}},
        {"resample": 9},
        {"do_pad": True},
        {"do_convert_rgb": False},
        {"image_mean": [0.5]},
        {"image_mean": 0.5},
        {"image_mean": True},
        {"image_mean": [0.5, 0.5, 10**400]},
        {"image_std": [0, 0, 0]},
        {"image_processor": "CLIPImageProcessor"},
        {"image_processor": None},
        {"rescale_factor": 2},
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_settings_of_pictures_that_are_refused(changed: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preprocessor_config.json: "):
        processor_of(folder, tmp_path, **changed)


def test_settings_of_pictures_that_are_known(folder: Path, tmp_path: Path) -> None:
    square = processor_of(folder, tmp_path, size={"height": SIDE, "width": SIDE}, do_center_crop=False)
    assert (square.resize, square.crop) == ((SIDE, SIDE), None)
    assert processor_of(folder, tmp_path, size=SIDE, crop_size=SIDE) == processor_of(folder, tmp_path)
    plain = processor_of(folder, tmp_path, do_normalize=False, do_rescale=False)
    assert (plain.values.scale, plain.values.mean, plain.values.std) == (1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert processor_of(folder, tmp_path, do_resize=False).resize is None


# All of it


@pytest.mark.slow  # the first of test_images_other_apis.py asks the same server in three ways
def test_a_whole_server_answers_as_transformers(folder: Path, start_server: Callable[..., ServerProcess]) -> None:
    """The engine in its process, the decoder in its own, the answer whole and as a stream."""
    from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

    server = start_server(str(folder), "--port", "0")
    url = server.wait_until_ready() + CHAT
    body = chat("Is ", image(1), " like ", image(2), "?", max_tokens=12, ignore_eos=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = f"user: Is {'<image>' * PLACES} like {'<image>' * PLACES}? assistant:"
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    pixels = AutoImageProcessor.from_pretrained(folder, use_fast=False)([picture(1), picture(2)], return_tensors="pt")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, **pixels
        )[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")  # of a character that is not whole
    answer = httpx.post(url, json=body | {"return_token_ids": True}, timeout=60).json()
    assert (
        answer["choices"][0]["token_ids"] == tokens
        and answer["choices"][0]["message"]["content"].rstrip("\ufffd") == text
    )
    with (
        closing(httpx.Client(timeout=60)) as client,
        client.stream("POST", url, json=body | {"stream": True}) as stream,
    ):
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    streamed = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
    assert streamed.rstrip("\ufffd") == text


def test_gpt2_loads_nothing_of_it() -> None:
    code = (
        "import sys, stage02_server.api_server, stage02_server.serving_chat, stage03_engine.arg_utils as a\n"
        "a.EngineArgs.from_kwargs(model='gpt2-tiny')\n"
        "found = [m for m in sys.modules if '.images.' in m or 'multimodal' in m or m.partition('.')[0] in ('PIL', 'httpx')]\n"
        "print(sorted(found))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    light = [
        "stage02_server.features.images.fields", "stage02_server.features.images.manifest", "stage03_engine.multimodal",
        "stage03_engine.multimodal.manifest", "stage03_engine.multimodal.shape_fields", "stage03_engine.params.multimodal",
    ]  # fmt: skip
    assert json.loads(run.stdout.replace("'", '"')) == light


def test_the_defaults_fit_together() -> None:
    """A picture of the largest size fits into what may be held, and a body may hold a file."""
    assert (
        MultiModalConfig.max_image_bytes <= 8388608 and ImageFlags.max_held_image_bytes > DEFAULT_LIMIT * 336 * 336 * 3
    )
