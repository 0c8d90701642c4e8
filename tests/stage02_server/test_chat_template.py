"""From messages to one prompt."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from server_under_test import InProcessServer

from stage03_engine.errors import ConfigError

CHAT = "/v1/chat/completions"


def prompt_of(server: InProcessServer, messages: list[dict[str, Any]]) -> str:
    """What the template makes of messages, through the public tokenizer."""
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def test_without_a_template_contents_are_concatenated_and_that_is_said_once(
    make_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        server = make_server()
        assert prompt_of(server, MESSAGES) == "Be kind.Hi"
        answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 10}).json()["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "Be kind.Hi"}
    assert sum("no chat template" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("as_file", [False, True])
def test_a_given_template_replaces_concatenation(make_server: Any, tmp_path: Path, as_file: bool) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    server = make_server(chat_template=str(tmp_path / "chat.jinja") if as_file else template)
    assert prompt_of(server, MESSAGES) == "<system>Be kind.<user>Hi<bot>"


def test_text_parts_are_joined_and_missing_content_is_empty(make_server: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "x", "name": "y"}]
    assert prompt_of(make_server(), messages) == "a\nb"


def test_the_response_role_is_a_setting(make_server: Any) -> None:
    answer = make_server(response_role="poet").post(CHAT, {"messages": MESSAGES}).json()
    assert answer["choices"][0]["message"]["role"] == "poet"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",  # the sandbox is immutable
        "{{ ''.__class__.__mro__ }}",  # and closed
        "{% for i in range(999999) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_a_400(make_server: Any, template: str) -> None:
    response = make_server(chat_template="{# #}" + template).post(CHAT, {"messages": MESSAGES})
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("messages", "prompt")


@pytest.mark.parametrize("given", ["{{ unfinished", "no/such/file.jinja", "/"])
def test_an_unusable_template_is_a_config_error(make_server: Any, given: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template") as error:
        make_server(chat_template=given)
    assert "\n" not in str(error.value)
