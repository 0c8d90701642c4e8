"""Echo and scoring: the prompt as the beginning of the answer, with its logprobs, whole and in streams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from server_under_test import EOS, MAX_MODEL_LEN, InProcessServer, events

PATH = "/v1/completions"
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
prompts = texts | st.lists(st.integers(0, EOS), min_size=1, max_size=30)


def choices_of(server: InProcessServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def joined(server: InProcessServer, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices that a stream adds up to, and that its first chunks alone speak of the prompt."""
    chunks = events(server.post(PATH, body | {"stream": True}).text)
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        mine = whole.setdefault(choice["index"], choice)
        if mine is not choice:
            assert choice["prompt_token_ids"] is None
            mine["text"] += choice["text"]
            mine["finish_reason"], mine["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
            if mine["token_ids"] is not None:
                mine["token_ids"] += choice["token_ids"]
            for key, values in (choice["logprobs"] or {}).items():
                mine["logprobs"][key] += values
    return whole


bodies = st.fixed_dictionaries(
    {
        "prompt": st.lists(texts, min_size=1, max_size=3) | prompts,
        "echo": st.booleans(),
        "logprobs": st.none() | st.integers(0, 3),
        "max_tokens": st.integers(1, 12),
        "n": st.integers(1, 3),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
    },
    optional={"truncate_prompt_tokens": st.integers(1, 5)},
)


@given(body=bodies, scoring=st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(server: InProcessServer, body: dict[str, Any], scoring: bool) -> None:
    if scoring:
        body = body | {"echo": True, "max_tokens": 0}
    whole = choices_of(server, body)
    told = [choice.pop("prompt_logprobs") for choice in whole]  # which a stream has no place for
    assert all((one is None) == (not body["echo"] or body["logprobs"] is None) for one in told)
    streamed = joined(server, body)
    assert [choice.pop("prompt_logprobs") for choice in streamed.values()] == [None] * len(streamed)
    for choice in [*whole, *streamed.values()]:
        if choice["logprobs"] is not None:
            del choice["logprobs"]["text_offset"]  # of a chunk it begins where the text ends (test_text_offsets.py)
    assert streamed == {choice["index"]: choice for choice in whole}


@given(body=bodies)
def test_echo_is_the_prompt_before_the_same_answer(server: InProcessServer, body: dict[str, Any]) -> None:
    bare, echoed = (choices_of(server, body | {"echo": echo}) for echo in (False, True))
    scored = choices_of(server, body | {"echo": True, "max_tokens": 0})
    for answer, both, prompt in zip(bare, echoed, scored, strict=True):
        assert both["text"] == prompt["text"] + answer["text"]
        assert both["token_ids"] == answer["token_ids"] and both["prompt_token_ids"] == prompt["prompt_token_ids"]
        if isinstance(body["prompt"], str) and "truncate_prompt_tokens" not in body:
            assert prompt["text"] == body["prompt"]
        for key, values in (both["logprobs"] or {}).items():
            start = sum(map(len, prompt["logprobs"]["tokens"])) if key == "text_offset" else None
            after = answer["logprobs"][key] if start is None else [start + v for v in answer["logprobs"][key]]
            assert values == prompt["logprobs"][key] + after


@given(prompt=prompts, top=st.integers(0, 3), skip=st.booleans())
def test_every_prompt_token_is_where_its_offset_says(
    server: InProcessServer, prompt: str | list[int], top: int, skip: bool
) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": top, "skip_special_tokens": skip}
    body["return_token_ids"] = True
    (choice,) = choices_of(server, body)
    logprobs, ids = choice["logprobs"], choice["prompt_token_ids"]
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([], "length", None)
    assert logprobs["token_logprobs"] == [None] + [0.0] * (len(ids) - 1) and logprobs["top_logprobs"][0] is None
    assert all(1 <= len(position) <= max(1, top) for position in logprobs["top_logprobs"][1:])
    if "\ufffd" not in choice["text"] + logprobs["tokens"][0] and not (EOS in ids and skip):
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"].startswith(token, offset)


@given(prompt=texts)
def test_the_texts_of_a_prompts_tokens_add_up_to_it(server: InProcessServer, prompt: str) -> None:
    """But for a character that the first token begins: nothing predicts it, and it is told alone."""
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0, "skip_special_tokens": False}
    (choice,) = choices_of(server, body | {"return_token_ids": True})
    if len(prompt[0].encode()) == 1:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == prompt
    ids = map(str, choice["prompt_token_ids"][1:])
    shown = [entry[token]["decoded_token"] for token, entry in zip(ids, choice["prompt_logprobs"][1:], strict=True)]
    assert choice["logprobs"]["tokens"][1:] == shown


def test_scoring_gives_nothing_and_counts_nothing(server: InProcessServer) -> None:
    """What evaluation harnesses send: several prompts as token ids, no output."""
    body = {"prompt": [[1, 2, 3], [4, EOS]], "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    answer = server.post(PATH, body).json()
    assert [choice["text"] for choice in answer["choices"]] == ['"#$', "%"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 0)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.post(PATH, body | {"stream": True, "stream_options": options}).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 0, 0]
    assert chunks[-1]["usage"] == answer["usage"]


def test_prompt_logprobs_beside_echo_are_as_many_as_asked_for(server: InProcessServer) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 1}
    for logprobs, of_prompt in ((3, 1), (1, 3), (None, 2), (2, None)):
        (choice,) = choices_of(server, body | {"logprobs": logprobs, "prompt_logprobs": of_prompt})
        positions = (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"][1:]
        assert {len(p) for p in positions} == (set() if logprobs is None else {logprobs})
        assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {of_prompt or logprobs}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "use_beam_search": True}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "max_tokens": 0, "prompt": "x" * MAX_MODEL_LEN}, "prompt"),
        ({"echo": True, "max_tokens": 0, "prompt": [1, EOS + 1]}, "prompt"),
    ],
)
def test_refused(server: InProcessServer, body: dict[str, Any], param: str) -> None:
    response = server.post(PATH, {"prompt": "Hello"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert server.engine.num_unfinished_requests == 0


def test_echo_with_beam_search(server: InProcessServer) -> None:
    body = {"prompt": "ab", "use_beam_search": True, "n": 2, "max_tokens": 3}
    plain, echoed = choices_of(server, body), choices_of(server, body | {"echo": True})
    assert [c["text"] for c in echoed] == ["ab" + c["text"] for c in plain]
    assert [c["text"] for c in choices_of(server, body | {"echo": True, "max_tokens": 0})] == ["ab", "ab"]
