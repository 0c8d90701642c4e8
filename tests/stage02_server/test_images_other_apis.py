"""Images in the Responses and Messages APIs: the answers of chats, and the same rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from patience import PATIENCE
from pictures_elsewhere import config, folder, servers_of
from seeing_server import data_url, image_part
from server_under_test import InProcessServer, ServerProcess
from small_llava import PLACES, SIDE, encoded, picture, reference_tokens
from tokenizers import Tokenizer

from stage03_engine.config import VllmConfig

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
__all__ = ["config", "folder"]  # fixtures
TEXT = "user: Is <image> like <image>? assistant:"  # what small_llava's template makes of the parts below


@pytest.fixture(scope="module")
def serve(config: VllmConfig) -> Iterator[Callable[..., InProcessServer]]:
    """With a name for the model, which these APIs want."""
    yield from servers_of(config, served_model_name=("m",))


def input_image(data: bytes | int | str) -> dict[str, Any]:
    url = data if isinstance(data, str) else data_url(data)
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def block(data: bytes | int | str) -> dict[str, Any]:
    if isinstance(data, str):
        return {"type": "image", "source": {"type": "url", "url": data}}
    text = data_url(data).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}


def responses(*parts: Any, **fields: Any) -> dict[str, Any]:
    texts = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": "m", "input": [{"role": "user", "content": texts}], "max_output_tokens": 4} | fields


def messages(*parts: Any, **fields: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": "m", "messages": [{"role": "user", "content": texts}], "max_tokens": 4} | fields


WAYS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]], str]] = {
    RESPONSES: (responses, input_image, "image_url"),
    MESSAGES: (messages, block, "source"),
    COUNT: (lambda *parts: {k: v for k, v in messages(*parts).items() if k != "max_tokens"}, block, "source"),
}  # path -> (body of parts, an image as a part, the field that refusals name)


def refusal(server: InProcessServer, path: str, body: dict[str, Any], status: int = 400) -> str:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    assert "\n" not in message
    return message


def test_the_answers_of_real_clients_are_those_of_a_chat(
    folder: Path, start_server: Callable[..., ServerProcess]
) -> None:
    """And those of transformers; whole, as a stream, and in a conversation that goes on."""
    server = start_server(str(folder), "--port", "0", "--served-model-name", "m", "--dtype", "float32")
    url = server.wait_until_ready()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = reference_tokens(folder, TEXT, [picture(1), picture(2)], 12)
    expected = tokenizer.decode(tokens).rstrip("\ufffd")
    parts = [{"type": "text", "text": "Is "}, 1, {"type": "text", "text": " like "}, 2, {"type": "text", "text": "?"}]
    images = [image_part(part) if isinstance(part, int) else part for part in parts]
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client,
        Anthropic(base_url=url, api_key="none", timeout=PATIENCE) as claude,
    ):
        same: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 12}
        content: Any = images
        chat = client.chat.completions.create(messages=[{"role": "user", "content": content}], **same)
        assert (chat.choices[0].message.content or "").rstrip("\ufffd") == expected

        asked: Any = responses("Is ", input_image(1), " like ", input_image(2), "?")["input"]
        given: dict[str, Any] = {"model": "m", "temperature": 0, "max_output_tokens": 12}
        answer = client.responses.create(input=asked, **given)
        assert answer.output_text.rstrip("\ufffd") == expected
        assert answer.usage is not None and chat.usage is not None
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        streamed = list(client.responses.create(input=asked, stream=True, **given))
        assert streamed[-1].response.output_text.rstrip("\ufffd") == expected  # type: ignore[union-attr]
        after = client.responses.create(input="Sure?", previous_response_id=answer.id, **given)
        whole: Any = [
            *asked,
            *({"role": "assistant", "content": answer.output_text},),
            {"role": "user", "content": "Sure?"},
        ]
        again = client.responses.create(input=whole, **given)
        assert after.output_text == again.output_text and after.usage == again.usage

        said: Any = messages("Is ", block(1), " like ", block(2), "?")["messages"]
        greedy: dict[str, Any] = {"model": "m", "max_tokens": 12, "extra_body": {"temperature": 0}}
        message = claude.messages.create(messages=said, **greedy)
        assert message.content[0].text.rstrip("\ufffd") == expected  # type: ignore[union-attr]
        count = claude.messages.count_tokens(model="m", messages=said).input_tokens
        assert count == message.usage.input_tokens == chat.usage.prompt_tokens
        with claude.messages.stream(messages=said, **greedy) as stream:
            assert stream.get_final_text().rstrip("\ufffd") == expected


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_the_engine_gets_what_a_chat_gives_it(path: str, serve: Callable[..., InProcessServer]) -> None:
    server, (body, image, _) = serve(), WAYS[path]
    for each, way in (({"/v1/chat/completions": 0}, "chat"), ({path: 0}, "other")):
        (to,) = each
        parts = ["Is ", image(1), " like ", image(2)] if way == "other" else [
            {"type": "text", "text": "Is "}, image_part(1),
            {"type": "text", "text": " like "}, image_part(2),
        ]  # fmt: skip
        sent = body(*parts) if way == "other" else {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        assert server.post(to, sent).status_code == 200
    chat, other = server.client.requests  # type: ignore[attr-defined]
    assert other.task == chat.task and len(other.task.features) == 2
    assert other.prompt_token_ids == chat.prompt_token_ids


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_result_of_a_tool_may_be_an_image(path: str, serve: Callable[..., InProcessServer]) -> None:
    server = serve()
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": [input_image(1)]}
        body = responses("Look") | {"input": [{"role": "user", "content": "Look"}, call, result]}
    else:
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [block(1)]}
        said = [("user", "Look"), ("assistant", [use]), ("user", [result])]
        body = messages() | {"messages": [{"role": role, "content": content} for role, content in said]}
    template = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] or [] %}{% if p['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}{% endfor %}"
    server = serve(chat_template=template)
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    (request,) = server.client.requests  # type: ignore[attr-defined]
    assert len(request.task.features) == 1


BROKEN: dict[str, Any] = {
    "no image": b"abcdef",
    "cut": encoded(picture(1, (200, 150)))[:200],
    "an address": "https://example.org/a.png",
    "a file": "file:///etc/passwd",
    "too many bytes": encoded(picture(2, (300, 300))),
    "too many pixels": encoded(picture(1, (200, 2)).convert("1")),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("path", WAYS)
def test_the_rules_of_chats_hold(path: str, what: str, serve: Callable[..., InProcessServer]) -> None:
    """Each file is held against the limits, and each address against the domains; what is wrong has one line."""
    body, image, field = WAYS[path]
    server = serve(max_image_bytes=len(BROKEN["too many bytes"]) - 1, max_image_pixels=10_000)
    assert refusal(server, path, body("See", image(BROKEN[what]))).startswith(f"{field}: the image ")
    assert server.post(path, body("See", image(1))).status_code == 200


@pytest.mark.parametrize("path", WAYS)
def test_how_many_and_how_much(path: str, serve: Callable[..., InProcessServer]) -> None:
    body, image, _ = WAYS[path]
    server = serve(limit_mm_per_prompt={"image": 2}, max_held_image_bytes=2 * SIDE * SIDE * 3 - 1)
    assert "At most 2 image(s)" in refusal(server, path, body(image(1), image(2), image(3)))
    assert "(--max-held-image-bytes)" in refusal(server, path, body(image(1), image(2)), 429)
    for _ in range(3):  # each is let go
        assert server.post(path, body(image(1))).status_code == 200
        server.client.requests.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", WAYS)
def test_a_model_of_text_alone_says_so(path: str, server: InProcessServer) -> None:
    body, image, field = WAYS[path]
    name = server.request("GET", "/v1/models").json()["data"][0]["id"]
    response = server.post(path, body("See", image(1)) | {"model": name})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: this is not a multimodal model")


INCOMPLETE: dict[str, tuple[str, dict[str, Any]]] = {
    "no address": (RESPONSES, {"type": "input_image"}),
    "a stored file": (RESPONSES, {"type": "input_image", "file_id": "file-1"}),
    "an address in an object": (RESPONSES, {"type": "input_image", "image_url": {"url": "x"}}),
    "no source": (MESSAGES, {"type": "image"}),
    "no data": (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
    "no media_type": (MESSAGES, {"type": "image", "source": {"type": "base64", "data": "YWJj"}}),
    "another media_type": (
        MESSAGES,
        {"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": "YWJj"}},
    ),
    "no url": (MESSAGES, {"type": "image", "source": {"type": "url"}}),
    "a file's id": (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}),
    "a source that is a text": (MESSAGES, {"type": "image", "source": "YWJj"}),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_is_incomplete(what: str, serve: Callable[..., InProcessServer]) -> None:
    path, part = INCOMPLETE[what]
    assert refusal(serve(), path, WAYS[path][0]("See", part))


def test_only_users_and_tools_show_images(serve: Callable[..., InProcessServer]) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block(1)]}]
    assert "in a message of role 'assistant'" in refusal(serve(), MESSAGES, messages() | {"messages": said})
    assert "content block of type 'image'" in refusal(serve(), MESSAGES, messages("x", system=[block(1)]))


def test_tokens_are_counted_with_the_places_of_images(serve: Callable[..., InProcessServer]) -> None:
    server, (body, _, _) = serve(), WAYS[COUNT]
    one, two = (
        server.post(COUNT, body("See", *images)).json()["input_tokens"] for images in ([block(1)], [block(1)] * 2)
    )
    assert two - one == PLACES
    assert server.post(COUNT, body("See")).status_code == httpx.codes.OK


def test_a_prompt_loses_no_part_of_an_image(serve: Callable[..., InProcessServer]) -> None:
    """What is cut is cut from text."""
    server = serve()
    long = responses(input_image(1), "x" * 900, truncation="auto")
    assert refusal(server, RESPONSES, long).startswith("truncation: it would cut off an image")
    assert server.post(RESPONSES, responses("x" * 900, input_image(1), truncation="auto")).status_code == 200
    image = image_part(1)
    chat = {"messages": [{"role": "user", "content": ["See", image, "this"]}], "max_tokens": 4}
    for keep in (4, len("this assistant:") + PLACES - 1):
        assert "would cut off an image" in refusal(
            server, "/v1/chat/completions", chat | {"truncate_prompt_tokens": keep}
        )
    assert server.post("/v1/chat/completions", chat | {"truncate_prompt_tokens": 40}).status_code == 200


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("text", ["<image>", "x" * 600], ids=["a place of its own", "too long"])
def test_what_is_refused_after_its_picture_was_loaded_holds_nothing(
    path: str, text: str, serve: Callable[..., InProcessServer]
) -> None:
    """Its prompt is: it has one place too many, or is too long. There is room for one picture."""
    server = serve(max_held_image_bytes=SIDE * SIDE * 3)
    made, part, _ = WAYS[path]
    if path == COUNT:  # which refuses neither, and holds it no longer than that
        for number in range(4):
            assert server.post(path, made(text, part(number))).status_code == 200
    else:
        for number in range(4):
            refusal(server, path, made(text, part(number)))
    assert server.post(RESPONSES, responses(input_image(9))).status_code == 200
