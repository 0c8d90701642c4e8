"""What must hold for every request: no body breaks the server, and a stream says the same as a whole answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st
from server_under_test import MAX_MODEL_LEN, InProcessServer, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\ud800", 2**63, 10**30])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
fields = st.sampled_from(
    ["prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
     "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "tools", "tokens",
     "skip_special_tokens", "ignore_eos", "logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty", "allowed_token_ids", "bad_words",
     "min_tokens", "truncate_prompt_tokens", "spaces_between_special_tokens", "best_of", "prompt_logprobs", "use_beam_search",
     "length_penalty", "early_stopping", "vllm_xargs", "user", "include_stop_str_in_output", "return_token_strs",
     "return_token_ids", "return_tokens_as_token_ids", "truncation_side", "stream_interval", "request_id", "suffix"]
)  # fmt: skip
valid = st.fixed_dictionaries(
    {"prompt": st.just("Hello"), "messages": st.just([{"role": "user", "content": "Hello"}]), "tokens": st.just([1])}
)
nearly_valid = st.builds(lambda good, bad: good | bad, valid, st.dictionaries(fields, anything, max_size=3))


def text_body(body: Any) -> bytes:
    return json.dumps(body).encode()  # Python writes NaN and lone surrogates, which a client in C might do as well


@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    body=nearly_valid.map(text_body) | anything.map(text_body) | st.binary(max_size=30),
)
def test_no_body_breaks_the_server(server: InProcessServer, path: str, body: bytes) -> None:
    response = server.request("POST", path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["code"] == response.status_code
    assert server.engine.num_unfinished_requests == 0
    assert server.post(COMPLETIONS, {"prompt": "next", "max_tokens": 2}).json()["choices"][0]["text"] == "ne"


prompts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: len(text.encode()) < MAX_MODEL_LEN
)
wishes = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 40),
        "n": st.integers(1, 3),
        "stop": st.lists(prompts.map(lambda t: t[:3]), max_size=2),
    }
)


@given(prompts=st.lists(prompts, min_size=1, max_size=3), wishes=wishes, logprobs=st.none() | st.integers(0, 3))
def test_a_completion_stream_adds_up_to_the_whole_answer(
    server: InProcessServer, prompts: list[str], wishes: dict[str, Any], logprobs: int | None
) -> None:
    body = {"prompt": prompts, "logprobs": logprobs} | wishes
    whole = server.post(COMPLETIONS, body).json()
    stream = server.post(COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert stream.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(stream.text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len(whole["choices"]) == len(prompts) * wishes["n"]
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if logprobs is not None:
            for key, values in choice["logprobs"].items():
                assert [value for c in mine if c["logprobs"] for value in c["logprobs"][key]] == values
        else:
            assert choice["logprobs"] is None
    assert all(chunk["usage"] is None and chunk["id"] == chunks[0]["id"] for chunk in chunks)


@given(prompt=prompts, wishes=wishes, top=st.none() | st.integers(0, 3))
def test_a_chat_stream_adds_up_to_the_whole_answer(
    server: InProcessServer, prompt: str, wishes: dict[str, Any], top: int | None
) -> None:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "logprobs": top is not None,
        "top_logprobs": top,
    } | wishes
    whole = server.post(CHAT, body).json()
    chunks = events(server.post(CHAT, body | {"stream": True}).text)
    assert all("usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        first, *mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        streamed = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert streamed == (choice["logprobs"] or {"content": []})["content"]
        for entry in streamed:
            assert len(entry["top_logprobs"]) == top and entry["logprob"] == 0.0
        if "\ufffd" not in choice["message"]["content"] and choice["finish_reason"] != "stop":
            written, told = (b"".join(bytes(entry["bytes"]) for entry in streamed), [e["token"] for e in streamed])
            assert written.decode(errors="ignore") == "".join(told)


@given(prompt=prompts, max_tokens=st.integers(1, 40))
def test_text_offsets_count_whole_characters(server: InProcessServer, prompt: str, max_tokens: int) -> None:
    answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0}).json()
    source = prompt.encode()
    tokens = (source * max_tokens)[: min(max_tokens, MAX_MODEL_LEN - len(source))]  # one token per byte
    expected = [len(tokens[:i].decode(errors="ignore")) for i in range(len(tokens))]
    assert answer["choices"][0]["logprobs"]["text_offset"] == expected


@given(prompt=prompts, n=st.integers(1, 3), max_tokens=st.integers(1, 9))
def test_continuous_usage_counts_each_answer(server: InProcessServer, prompt: str, n: int, max_tokens: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompt, "n": n, "max_tokens": max_tokens, "stream": True, "stream_options": options}
    *chunks, last = events(server.post(COMPLETIONS, body).text)
    size = len(prompt.encode())
    limit = min(max_tokens, MAX_MODEL_LEN - size)
    for index in range(n):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[-1] == limit
        assert all(u["prompt_tokens"] == size and u["total_tokens"] == size + u["completion_tokens"] for u in usages)
    assert last["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": n * limit,
        "total_tokens": size + n * limit,
        "prompt_tokens_details": None,
    }
