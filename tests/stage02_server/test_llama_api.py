"""What a tokenizer with a beginning-of-text token changes for clients: prompts get it once, from one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_under_test import InProcessServer
from small_tokenizers import byte_level, model_folder, sentencepiece

from stage03_engine.arg_utils import EngineArgs

BOS = 1
MESSAGES = [{"role": "user", "content": "to be"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(params=["llama2", "llama3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    backend = sentencepiece() if request.param == "llama2" else byte_level()
    return model_folder(tmp_path, backend, {"bos_token": "<s>", "eos_token": "</s>"}, eos_token_id=[2, 9])


def serve(make_server: Any, folder: Path) -> InProcessServer:
    return make_server(config=EngineArgs.from_kwargs(model=str(folder), load_format="dummy"))


def test_a_prompt_begins_with_it_unless_the_client_says_no(make_server: Any, folder: Path) -> None:
    server = serve(make_server, folder)

    def tokens(**fields: Any) -> list[int]:
        tokens = server.post("/tokenize", {"prompt": "to be", **fields}).json()["tokens"]
        answer = server.post("/v1/completions", {"prompt": "to be", "max_tokens": 1, **fields}).json()
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        return tokens

    plain = tokens(add_special_tokens=False)
    assert BOS not in plain
    assert tokens() == tokens(add_special_tokens=True) == [BOS, *plain]


def test_a_template_brings_its_own(make_server: Any, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    server = serve(make_server, folder)

    def tokens(**fields: Any) -> list[int]:
        tokens = server.post("/tokenize", {"messages": MESSAGES, **fields}).json()["tokens"]
        body = {"messages": MESSAGES, "max_tokens": 1, **fields}
        assert server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == len(tokens)
        return tokens

    assert tokens()[0] == BOS and tokens()[1] != BOS and tokens()[-1] == 2
    assert tokens(add_special_tokens=False) == tokens()
    assert tokens(add_special_tokens=True) == [BOS, *tokens()]


def test_templates_find_the_names_that_transformers_gives_them(make_server: Any, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ tools is none }}{{ documents is none }}{{ bos_token }}{{ eos_token }}"
    )
    server = serve(make_server, folder)
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"].lstrip() == "TrueTrue<s></s>"


def test_a_chat_without_a_template_gets_it_too(make_server: Any, folder: Path) -> None:
    server = serve(make_server, folder)
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert chat == server.post("/tokenize", {"prompt": "to be"}).json()["tokens"]


def test_a_text_comes_back_through_the_api(make_server: Any, folder: Path) -> None:
    """The echo engine says the prompt again; its text is whole, and the space that separates it from the prompt is its own."""
    server = serve(make_server, folder)
    prompt = "to be, é 😀\n\nto be"
    tokens = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    again = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert again.removeprefix("<s>").strip(" ") == prompt
    body = {"prompt": prompt, "max_tokens": len(tokens), "temperature": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == again.removeprefix("<s>")


def test_each_end_of_text_ends_an_answer(make_server: Any, folder: Path) -> None:
    server = serve(make_server, folder)
    for end in (2, 9):
        body = {"prompt": [40, end, 41], "max_tokens": 3}
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["stop_reason"] == (None if end == 2 else end)
        ignoring = server.post("/v1/completions", body | {"ignore_eos": True}).json()
        assert ignoring["choices"][0]["finish_reason"] == "length"
