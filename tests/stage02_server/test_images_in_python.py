"""Images in LLM.chat and LLM.generate: against transformers on the same weights, and where they may come from."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pictures_elsewhere import FAILING, MOST_BYTES, READABLE, UNREADABLE, folder_of_files, serving_files
from small_llava import encoded, llava_folder, picture, reference_tokens

from stage02_server.features.images import fetch as fetch_module
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "user: Is <image> like <image>? assistant:"  # what small_llava's template makes of the chat below


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_gpu_blocks_override=100) as made:
        yield made


def by_url(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(encoded(picture(number))).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def by_pillow(number: int) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": picture(number)}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def compared(first: Any, second: Any) -> list[dict[str, Any]]:
    return said("Is ", first, {"type": "text", "text": " like "}, second, "?")


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_files_and_images_of_pillow(llm: LLM, folder: Path) -> None:
    """Each chat of several has its own images."""
    expected = [
        reference_tokens(folder, TEXT, [picture(first), picture(second)], 8) for first, second in ((1, 2), (3, 1))
    ]
    assert expected[0] != expected[1]
    chats = [compared(by_url(1), by_pillow(2)), compared(by_pillow(3), by_url(1))]
    assert tokens(llm.chat(chats, GREEDY)) == expected
    assert tokens(llm.chat(compared(by_url(1), by_url(2)), GREEDY)) == expected[:1]
    mixed = [said("Words"), compared(by_pillow(1), by_pillow(2)), [{"role": "user", "content": "Words"}]]
    words, seen, same = tokens(llm.chat(mixed, GREEDY, chat_template_content_format="openai"))
    assert seen == expected[0] and words == same


def test_the_callers_messages_stay_as_they_are(llm: LLM) -> None:
    messages = compared(by_pillow(1), by_url(2))
    kinds = [part if isinstance(part, str) else part["type"] for part in messages[0]["content"]]
    first = tokens(llm.chat(messages, GREEDY))
    assert [part if isinstance(part, str) else part["type"] for part in messages[0]["content"]] == kinds
    assert tokens(llm.chat(messages, GREEDY)) == first


REFUSED: dict[str, tuple[Any, str]] = {
    "an address": (
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        "must come as a data: URL",
    ),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no file is read here"),
    "a broken file": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}, "is not a PNG"),
    "no image of Pillow": ({"type": "image_pil", "image_pil": "cat.png"}, "a picture is a PIL.Image.Image, not str"),
    "nothing": ({"type": "image_pil"}, "a picture is a PIL.Image.Image, not NoneType"),
    "another kind": ({"type": "video_url", "video_url": {"url": "x"}}, "'video_url' cannot be served"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, llm: LLM) -> None:
    part, why = REFUSED[what]
    with pytest.raises(InvalidRequestError, match=why) as refused:
        llm.chat([said(by_pillow(1)), said("x", part)], GREEDY)
    assert "\n" not in str(refused.value) and not llm.output_processor.request_states


@pytest.mark.parametrize("part", [by_url(1), by_pillow(1)], ids=["url", "pillow"])
def test_a_model_of_text_alone_says_so(part: dict[str, Any]) -> None:
    with LLM("gpt2-tiny", prefault_kv_cache=False) as made:
        with pytest.raises(InvalidRequestError, match="this is not a multimodal model"):
            made.chat(said("What?", part), GREEDY)
        assert made.chat(said("What?"), GREEDY)


# From elsewhere


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_files(tmp_path_factory.mktemp("above"))


@pytest.fixture(scope="module")
def open_llm(folder: Path, media: Path) -> Iterator[LLM]:
    """It may ask a host, and read a folder."""
    settings: dict[str, Any] = {
        "allowed_media_domains": ["LOCALHOST", "127.0.0.1"],
        "allowed_local_media_path": str(media),
        "max_image_bytes": MOST_BYTES,
        "media_fetch_seconds": 1,
        "limit_mm_per_prompt": {"image": 2},
    }
    with LLM(str(folder), num_gpu_blocks_override=100, **settings) as made:
        yield made


@pytest.fixture
def all_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "is_public", lambda address: True)


@pytest.fixture
def files() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    with serving_files() as serving:
        yield serving


def test_a_picture_of_another_server_is_the_picture(open_llm: LLM, llm: LLM, files: Any, all_public: None) -> None:
    """One chat, or several together, each with another event loop."""
    address, asked = files
    expected = tokens(llm.chat(compared(by_url(1), by_pillow(2)), GREEDY))
    chats = [compared(at(f"http://{address}/picture"), by_pillow(2))] * 2
    for _ in range(2):
        assert tokens(open_llm.chat(chats, GREEDY)) == expected * 2
    assert asked == [("/picture", address)] * 4


def refused(llm: LLM, part: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequestError) as error:
        llm.chat(said("x", part), GREEDY)
    assert "\n" not in str(error.value) and not llm.output_processor.request_states
    return str(error.value)


def test_nothing_is_asked_that_is_not_allowed(open_llm: LLM, llm: LLM, files: Any, all_public: None) -> None:
    address, asked = files
    assert "must come as a data: URL" in refused(llm, at(f"http://{address}/picture"))
    other = address.replace("localhost", "127.0.0.2")
    assert "must come from one of 127.0.0.1, localhost" in refused(open_llm, at(f"http://{other}/picture"))
    assert not asked


def test_an_address_within_is_not_asked(open_llm: LLM, files: Any) -> None:
    """Though its host is allowed."""
    address, asked = files
    for host in (address, address.replace("localhost", "127.0.0.1")):
        assert "an address that is not public" in refused(open_llm, at(f"http://{host}/picture"))
    assert not asked


@pytest.mark.parametrize("path", [*FAILING, "/silent"])
def test_what_another_server_may_do(path: str, open_llm: LLM, files: Any, all_public: None) -> None:
    """By the same bounds as in a server; a redirect is not followed, wherever it leads."""
    address, asked = files
    why = FAILING.get(path, "took longer than 1 seconds (--media-fetch-seconds)")
    assert why in refused(open_llm, at(f"http://{address}{path}"))
    assert asked == [(path, address)]


@pytest.mark.parametrize("how", READABLE)
def test_a_file_below_the_folder_is_the_picture(how: str, open_llm: LLM, llm: LLM, media: Path) -> None:
    expected = tokens(llm.chat(compared(by_url(1), by_pillow(2)), GREEDY))
    assert tokens(open_llm.chat(compared(at(READABLE[how](media)), by_pillow(2)), GREEDY)) == expected


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_not_read_of_this_machine(what: str, open_llm: LLM, media: Path) -> None:
    url, why = UNREADABLE[what]
    message = refused(open_llm, at(url(media)))
    assert what == "half a character" or why in message


def test_how_many_pictures_a_prompt_may_have(open_llm: LLM, llm: LLM, files: Any, all_public: None) -> None:
    """Of chats before any is fetched; of prompts too."""
    address, asked = files
    three = [at(f"http://{address}/picture")] * 3
    prompt = {"prompt": "<image>" * 3, "multi_modal_data": {"image": [picture(1)] * 3}}
    for call in (lambda: open_llm.chat(said(*three), GREEDY), lambda: open_llm.generate(prompt, GREEDY)):
        with pytest.raises(InvalidRequestError, match=r"At most 2 image\(s\) may be provided in one prompt, got 3"):
            call()
    assert not asked and not open_llm.output_processor.request_states
    assert llm.generate(prompt, GREEDY)


def test_an_address_in_a_prompt_is_no_picture(open_llm: LLM) -> None:
    """As in vLLM, where only chats have addresses."""
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": "http://localhost/a.png"}}
    with pytest.raises(InvalidRequestError, match="not str; LLM.chat takes addresses, as parts of type image_url"):
        open_llm.generate(prompt, GREEDY)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt: image must be a number of at least 0"),
    ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt: 'video' is not among what this model takes"),
    ({"allowed_media_domains": ["http://a"]}, "allowed_media_domains: 'http://a' is not a host name"),
    ({"allowed_local_media_path": "/nowhere"}, "allowed_local_media_path: '/nowhere' is not a folder"),
    ({"media_fetch_seconds": 0}, "media_fetch_seconds"),
    ({"max_image_bytes": 0}, "max_image_bytes"),
    ({"max_image_pixels": 0}, "max_image_pixels"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_setting_that_cannot_be_is_one_line(given: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        LLM(str(folder), **given)
    assert "\n" not in str(error.value)
