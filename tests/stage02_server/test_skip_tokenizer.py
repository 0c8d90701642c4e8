"""`--skip-tokenizer-init`: token ids in, token ids out; what needs text is refused, on every route."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_under_test import InProcessServer, events
from small_whisper import whisper_folder

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams

BUNDLED = BUNDLED_FOLDER / "gpt2-tiny"
IDS = [51, 78, 331]
SAID = "This engine has no tokenizer (--skip-tokenizer-init)"


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has none."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(BUNDLED / name, folder / name)
    return folder


def test_the_tokens_are_those_of_an_engine_with_one(without_tokenizer: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM("gpt2-tiny", num_gpu_blocks_override=70) as llm:
        expected = llm.generate([IDS], params)[0].outputs[0].token_ids
    with pytest.raises(ModelNotFoundError, match="has no tokenizer"):
        EngineArgs.from_kwargs(model=str(without_tokenizer))
    with LLM(str(without_tokenizer), num_gpu_blocks_override=70, skip_tokenizer_init=True) as llm:
        found = llm.generate([IDS], params)[0].outputs[0]
    assert (found.token_ids, found.text) == (expected, "")


def test_a_model_ends_where_its_config_says() -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", skip_tokenizer_init=True, hf_overrides={"eos_token_id": [7, 8]})
    with LLM(
        "gpt2-tiny", num_gpu_blocks_override=70, skip_tokenizer_init=True, hf_overrides={"eos_token_id": [7, 8]}
    ) as llm:
        assert (llm.tokenizer.eos_token_id, llm.tokenizer.more_eos_token_ids) == (7, config.shape.more_eos_token_ids)


@pytest.fixture
def server(make_server: Callable[..., InProcessServer]) -> Iterator[InProcessServer]:
    yield make_server(config=EngineArgs.from_kwargs(model="gpt2-tiny", skip_tokenizer_init=True))


def test_token_ids_come_one_by_one(server: InProcessServer) -> None:
    body = {"prompt": IDS, "max_tokens": 4, "stream": True, "return_token_ids": True}
    chunks = events(server.post("/v1/completions", body).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [len(choice["token_ids"]) for choice in choices if choice["token_ids"]] == [1] * 4
    assert {choice["text"] for choice in choices} == {""}


def test_logprobs_name_tokens_by_their_ids(server: InProcessServer) -> None:
    choice = server.post(
        "/v1/completions", {"prompt": IDS, "max_tokens": 2, "logprobs": 2, "return_token_ids": True}
    ).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


MESSAGES = [{"role": "user", "content": "x"}]
NEED_TEXT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "To be"}),
    ("/v1/completions", {"prompt": ["To be", "or not"]}),
    ("/v1/completions", {"prompt": IDS, "stop": ["x"]}),
    ("/v1/completions", {"prompt": IDS, "bad_words": ["x"]}),
    ("/v1/completions", {"prompt": IDS, "structured_outputs": {"regex": "a+"}}),
    ("/v1/completions", {"prompt": IDS, "echo": True}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ("/tokenize", {"prompt": "x"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": IDS}),
]


@pytest.mark.parametrize(("path", "body"), NEED_TEXT, ids=[f"{path} {json.dumps(body)}" for path, body in NEED_TEXT])
def test_what_needs_text_is_refused(server: InProcessServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {"model": "gpt2-tiny", "max_tokens": 3} | body if path.startswith("/v1") else body)
    assert answer.status_code == 400 and SAID in answer.json()["error"]["message"], answer.text
    assert server.post("/v1/completions", {"prompt": IDS, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "setting", [{"skip_tokenizer_init": True}, {"hf_overrides": {"vocab_size": 9}}], ids=lambda each: next(iter(each))
)
def test_a_model_of_sounds_is_read_by_another_library(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}.* Whisper"):
        EngineArgs.from_kwargs(model=str(whisper_folder(tmp_path)), **setting)


def test_there_is_nothing_to_show_of_a_tokenizer(make_server: Callable[..., InProcessServer]) -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="enable_tokenizer_info_endpoint shows the tokenizer"):
        make_server(config=config, enable_tokenizer_info_endpoint=True)
