"""Images in LLM.chat, against transformers on the same weights."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_llava import encoded, llava_folder, picture, reference_tokens

from stage03_engine.errors import InvalidRequestError
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
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data: URL"),
    "a broken file": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}, "is none of PNG"),
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
