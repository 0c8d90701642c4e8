"""What clients of vLLM and OpenAI count on, one row a behaviour: the request, and what the answer holds where.

A place is a path into the answer: "choices.0.text". Of a stream the answer is the list of its chunks, so "-1.usage" is the
usage of the last one. A path that begins with "#" asks for the number of entries.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from server_under_test import EOS, MAX_MODEL_LEN, InProcessServer, byte_config, events

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
AB, USER_AB = {"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]}
STREAM = {"stream": True}
USAGE = STREAM | {"stream_options": {"include_usage": True}}
EVERY = STREAM | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
A, B = 64, 65  # token ids of "a" and "b"
FIRST = 127  # that of the byte 0xC3, with which "é" begins
ABSENT = "nothing at this place"

Row = tuple[str, str, dict[str, Any], dict[str, Any]]
LOGPROBS: list[Row] = [
    # behaviour, path, body, what is where
    ("null unless asked for", COMPLETIONS, AB, {"choices.0.logprobs": None}),
    ("0 gives the drawn token alone", COMPLETIONS, AB | {"logprobs": 0}, {"choices.0.logprobs.top_logprobs.0": {"a": 0.0}}),
    ("k gives the k likeliest; no -Infinity in JSON", COMPLETIONS, AB | {"logprobs": 2},
     {"choices.0.logprobs.top_logprobs.0": {"a": 0.0, "b": -9999.0}, "choices.0.logprobs.token_logprobs.0": 0.0}),
    ("one entry per token", COMPLETIONS, AB | {"logprobs": 1, "max_tokens": 3},
     {"choices.0.logprobs.tokens": ["a", "b", "a"], "choices.0.logprobs.text_offset": [0, 1, 2],
      "#choices.0.logprobs.token_logprobs": 3, "#choices.0.logprobs.top_logprobs": 3}),
    ("tokens as ids", COMPLETIONS, AB | {"logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": True},
     {"choices.0.logprobs.tokens": ["token_id:64", "token_id:65"], "choices.0.text": "ab",
      "choices.0.logprobs.top_logprobs.1": {"token_id:65": 0.0}, "choices.0.logprobs.text_offset": [0, 11]}),
    ("a token that the text hides takes room all the same", COMPLETIONS, {"prompt": [A, EOS, B], "ignore_eos": True, "logprobs": 0, "max_tokens": 3},
     {"choices.0.text": "ab", "choices.0.logprobs.text_offset": [0, 1, 14]}),
    ("a chat's are null unless asked for", CHAT, USER_AB, {"choices.0.logprobs": None}),
    ("a chat's without top_logprobs", CHAT, USER_AB | {"logprobs": True, "max_tokens": 1},
     {"choices.0.logprobs.content.0": {"token": "a", "logprob": 0.0, "bytes": [97], "top_logprobs": []}}),
    ("a chat's top_logprobs", CHAT, USER_AB | {"logprobs": True, "top_logprobs": 2},
     {"choices.0.logprobs.content.0.top_logprobs.1": {"token": "b", "logprob": -9999.0, "bytes": [98]},
      "#choices.0.logprobs.content.0.top_logprobs": 2}),
    ("a chat's tokens as ids, with the bytes of the text", CHAT,
     USER_AB | {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
     {"choices.0.logprobs.content.0.token": "token_id:64", "choices.0.logprobs.content.0.bytes": [97],
      "choices.0.logprobs.content.0.top_logprobs.0.bytes": list(b"token_id:64")}),
    ("a character's text comes with its last byte", COMPLETIONS, {"prompt": "aé😀", "logprobs": 0, "max_tokens": 7},
     {"choices.0.logprobs.tokens": ["a", "", "é", "", "", "", "😀"], "choices.0.logprobs.text_offset": [0, 1, 1, 2, 2, 2, 2],
      "choices.0.logprobs.top_logprobs.1": {"": 0.0}, "choices.0.logprobs.top_logprobs.2": {"é": 0.0}}),
    ("and what no byte completes has none", COMPLETIONS, {"prompt": [FIRST, A], "logprobs": 0, "max_tokens": 2},
     {"choices.0.logprobs.tokens": ["", "a"], "choices.0.text": "\ufffda", "choices.0.logprobs.text_offset": [0, 0]}),
    ("a likely token is completed by what came before it", COMPLETIONS, {"prompt": "éè", "logprobs": 2, "max_tokens": 2},
     {"choices.0.logprobs.top_logprobs.1": {"é": 0.0, "ê": -9999.0}}),
    ("of two with one text the last one counts", COMPLETIONS, {"prompt": "é", "logprobs": 2, "max_tokens": 1},
     {"choices.0.logprobs.top_logprobs.0": {"": -9999.0}}),
    ("in a chat too, and its bytes with it", CHAT,
     {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "max_tokens": 2},
     {"choices.0.logprobs.content.0.token": "", "choices.0.logprobs.content.0.bytes": [],
      "choices.0.logprobs.content.1.token": "é", "choices.0.logprobs.content.1.bytes": [0xC3, 0xA9]}),
    ("and over the chunks of a stream", CHAT, {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "max_tokens": 2} | STREAM,
     {"1.choices.0.logprobs.content.1.token": "é"}),
    ("every chunk has those of its own tokens", COMPLETIONS, AB | STREAM | {"logprobs": 0, "max_tokens": 1},
     {"0.choices.0.logprobs.tokens": ["a"]}),
]  # fmt: skip
ECHO: list[Row] = [
    ("the prompt, then the answer", COMPLETIONS, AB | {"echo": True, "max_tokens": 3}, {"choices.0.text": "ababa"}),
    ("token ids are echoed as text", COMPLETIONS, {"prompt": [A, B], "echo": True, "max_tokens": 1}, {"choices.0.text": "aba"}),
    ("nothing predicts the first token", COMPLETIONS, AB | {"echo": True, "logprobs": 1, "max_tokens": 1},
     {"choices.0.logprobs.token_logprobs": [None, 0.0, 0.0], "choices.0.logprobs.top_logprobs": [None, {"b": 0.0}, {"a": 0.0}],
      "choices.0.logprobs.tokens": ["a", "b", "a"], "choices.0.logprobs.text_offset": [0, 1, 2]}),
    ("max_tokens 0 scores the prompt", COMPLETIONS, AB | {"echo": True, "logprobs": 0, "max_tokens": 0},
     {"choices.0.text": "ab", "choices.0.logprobs.tokens": ["a", "b"], "choices.0.finish_reason": "length",
      "usage.completion_tokens": 0}),
    ("and tells them in vLLM's shape too", COMPLETIONS, AB | {"echo": True, "logprobs": 0, "max_tokens": 0},
     {"choices.0.prompt_logprobs": [None, {"65": {"logprob": 0.0, "rank": 1, "decoded_token": "b"}}]}),
    ("null for a single token", COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0},
     {"choices.0.prompt_logprobs": [None]}),
    ("not without logprobs", COMPLETIONS, AB | {"echo": True, "max_tokens": 0}, {"choices.0.prompt_logprobs": None}),
    ("not in a stream", COMPLETIONS, AB | STREAM | {"echo": True, "logprobs": 1, "max_tokens": 0},
     {"0.choices.0.prompt_logprobs": None}),
    ("a prompt's character is told with its last byte", COMPLETIONS, {"prompt": "aé", "echo": True, "logprobs": 0, "max_tokens": 0},
     {"choices.0.logprobs.tokens": ["a", "", "é"], "choices.0.logprobs.text_offset": [0, 1, 1],
      f"choices.0.prompt_logprobs.1.{FIRST}.decoded_token": "", "choices.0.prompt_logprobs.2.102.decoded_token": "é"}),
    ("what the first token of a prompt begins stays unfinished", COMPLETIONS, {"prompt": "éa", "echo": True, "logprobs": 0, "max_tokens": 0},
     {"choices.0.text": "éa", "choices.0.logprobs.tokens": ["\ufffd", "", "a"], "choices.0.logprobs.text_offset": [0, 1, 1]}),
    ("whatever the engine would have said", COMPLETIONS, {"prompt": [EOS, A], "echo": True, "max_tokens": 0},
     {"choices.0.finish_reason": "length", "choices.0.stop_reason": None, "choices.0.text": "a"}),
    ("without echo nothing is said of the prompt", COMPLETIONS, AB | {"logprobs": 0, "max_tokens": 1},
     {"choices.0.logprobs.tokens": ["a"], "choices.0.prompt_logprobs": None}),
    ("each prompt before its own answers", COMPLETIONS, {"prompt": ["ab", "c"], "n": 2, "echo": True, "max_tokens": 1},
     {"choices.0.text": "aba", "choices.1.text": "aba", "choices.2.text": "cc", "choices.3.text": "cc"}),
    ("a stream begins with the prompt", COMPLETIONS, AB | STREAM | {"echo": True, "max_tokens": 1}, {"0.choices.0.text": "aba"}),
    ("stop strings look at the answer only", COMPLETIONS, AB | {"echo": True, "stop": "ba", "max_tokens": 9},
     {"choices.0.text": "aba", "choices.0.stop_reason": "ba"}),
    ("a stop string inside the prompt stops nothing", COMPLETIONS, {"prompt": "xyab", "echo": True, "stop": "ya", "max_tokens": 2},
     {"choices.0.text": "xyabxy", "choices.0.finish_reason": "length"}),
]  # fmt: skip
STOP: list[Row] = [
    ("length at max_tokens", COMPLETIONS, AB | {"max_tokens": 2}, {"choices.0.finish_reason": "length", "choices.0.stop_reason": None}),
    ("16 tokens unless told otherwise", COMPLETIONS, AB, {"usage.completion_tokens": 16}),
    ("null tells nothing", COMPLETIONS, AB | {"max_tokens": None}, {"usage.completion_tokens": 16}),
    ("a chat fills the context", CHAT, USER_AB, {"usage.total_tokens": MAX_MODEL_LEN, "choices.0.finish_reason": "length"}),
    ("a stop string is cut off", COMPLETIONS, {"prompt": "abcd", "stop": ["cd"]},
     {"choices.0.text": "ab", "choices.0.finish_reason": "stop", "choices.0.stop_reason": "cd"}),
    ("or kept", COMPLETIONS, {"prompt": "abcd", "stop": ["cd"], "include_stop_str_in_output": True}, {"choices.0.text": "abcd"}),
    ("a stop token says which", COMPLETIONS, AB | {"stop_token_ids": [B]}, {"choices.0.text": "a", "choices.0.stop_reason": B}),
    ("the end of text says nothing", COMPLETIONS, {"prompt": [A, EOS]}, {"choices.0.text": "a", "choices.0.stop_reason": None}),
    ("ignore_eos", COMPLETIONS, {"prompt": [A, EOS], "ignore_eos": True, "max_tokens": 4}, {"choices.0.text": "aa"}),
    ("special tokens on request", COMPLETIONS, {"prompt": [A, EOS], "ignore_eos": True, "max_tokens": 2, "skip_special_tokens": False},
     {"choices.0.text": "a<|endoftext|>"}),
    ("min_tokens holds a stop string back", COMPLETIONS, {"prompt": "abcd", "stop": "cd", "min_tokens": 5}, {"choices.0.text": "abcdab"}),
    ("a stream ends with the reason", COMPLETIONS, AB | STREAM | {"stop": "ba"},
     {"-1.choices.0.finish_reason": "stop", "-1.choices.0.stop_reason": "ba"}),
    ("a chat too", CHAT, USER_AB | {"stop": ["ba"]}, {"choices.0.message.content": "a", "choices.0.stop_reason": "ba"}),
]  # fmt: skip
STREAMING: list[Row] = [
    ("completions keep their object", COMPLETIONS, AB | STREAM, {"0.object": "text_completion", "0.id": "cmpl-me"}),
    ("chats have one of their own", CHAT, USER_AB | STREAM, {"0.object": "chat.completion.chunk", "0.id": "chatcmpl-me"}),
    ("a chat's first chunk says who speaks", CHAT, USER_AB | STREAM,
     {"0.choices.0.delta": {"role": "assistant", "content": ""}, "1.choices.0.finish_reason": None}),
    ("no usage unless asked for", COMPLETIONS, AB | STREAM, {"0.usage": ABSENT, "-1.usage": ABSENT}),
    ("usage in a chunk of its own", COMPLETIONS, AB | USAGE | {"max_tokens": 3},
     {"0.usage": None, "-1.choices": [], "-1.usage.completion_tokens": 3, "-1.usage.total_tokens": 5}),
    ("usage in every chunk", COMPLETIONS, AB | EVERY | {"max_tokens": 1},
     {"0.usage.completion_tokens": 1, "0.usage.prompt_tokens": 2, "-1.choices": []}),
    ("continuous_usage_stats alone is nothing", COMPLETIONS, AB | STREAM | {"stream_options": {"continuous_usage_stats": True}},
     {"0.usage": ABSENT, "-1.usage": ABSENT}),
    ("none of them before the first token", CHAT, USER_AB | EVERY | {"max_tokens": 1},
     {"0.usage.completion_tokens": 0, "1.usage.completion_tokens": 1, "-1.usage.completion_tokens": 1}),
    ("a chat's usage", CHAT, USER_AB | USAGE | {"max_tokens": 3}, {"-1.choices": [], "-1.usage.completion_tokens": 3}),
    ("token ids: the prompt's once", COMPLETIONS, AB | STREAM | {"max_tokens": 1, "return_token_ids": True},
     {"0.choices.0.prompt_token_ids": [A, B], "0.choices.0.token_ids": [A]}),
    ("a chat's prompt comes with the role", CHAT, USER_AB | STREAM | {"max_tokens": 1, "return_token_ids": True},
     {"0.prompt_token_ids": [A, B], "1.prompt_token_ids": None, "1.choices.0.token_ids": [A]}),
    ("so does its text", CHAT, USER_AB | STREAM | {"max_tokens": 1, "return_prompt_text": True},
     {"0.prompt_text": "ab", "1.prompt_text": None}),
]  # fmt: skip
ANSWERS: list[Row] = [
    ("one answer", COMPLETIONS, AB | {"max_tokens": 1},
     {"object": "text_completion", "id": "cmpl-me", "model": "byte-model", "#choices": 1, "choices.0.index": 0}),
    ("prompt as a list of texts", COMPLETIONS, {"prompt": ["ab", "c"], "max_tokens": 1}, {"choices.0.text": "a", "choices.1.text": "c"}),
    ("prompt as token ids", COMPLETIONS, {"prompt": [A, B], "max_tokens": 2}, {"choices.0.text": "ab", "#choices": 1}),
    ("prompt as lists of token ids", COMPLETIONS, {"prompt": [[A], [B]], "max_tokens": 1}, {"choices.0.text": "a", "choices.1.text": "b"}),
    ("n answers per prompt, in its order", COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 1},
     {"#choices": 4, "choices.2.index": 2, "choices.2.text": "b"}),
    ("the prompt counts once", COMPLETIONS, AB | {"n": 3, "max_tokens": 2},
     {"usage.prompt_tokens": 2, "usage.completion_tokens": 6, "usage.total_tokens": 8}),
    ("all prompts count", COMPLETIONS, {"prompt": ["ab", "c"], "max_tokens": 1}, {"usage.prompt_tokens": 3, "usage.completion_tokens": 2}),
    ("no token ids unless asked for", COMPLETIONS, AB, {"choices.0.token_ids": None, "choices.0.prompt_token_ids": None}),
    ("token ids of prompt and answer", COMPLETIONS, AB | {"max_tokens": 3, "return_token_ids": True},
     {"choices.0.token_ids": [A, B, A], "choices.0.prompt_token_ids": [A, B]}),
    ("a chat's prompt stands beside its choices", CHAT, USER_AB | {"max_tokens": 1, "return_token_ids": True},
     {"prompt_token_ids": [A, B], "choices.0.token_ids": [A]}),
    ("a chat's prompt as text", CHAT, USER_AB | {"max_tokens": 1, "return_prompt_text": True}, {"prompt_text": "ab"}),
    ("an empty name is the served model's", COMPLETIONS, AB | {"model": "", "max_tokens": 1}, {"model": "byte-model"}),
    ("a priority is fine without its policy", COMPLETIONS, AB | {"priority": -3, "max_tokens": 1}, {"#choices": 1}),
    ("stream_options that ask for nothing need no stream", COMPLETIONS, AB | {"stream_options": {}}, {"usage.total_tokens": 18}),
    ("no embeddings beside a prompt", COMPLETIONS, AB | {"prompt_embeds": [], "max_tokens": 1}, {"#choices": 1}),
    ("logit_bias by numbers as text", COMPLETIONS, AB | {"logit_bias": {"5": 1, " 6": -200}}, {"#choices": 1}),
    ("named tokens stand behind the drawn one", CHAT, USER_AB | {"logprobs": True, "logprob_token_ids": [B, A, B], "max_tokens": 1},
     {"choices.0.logprobs.content.0.top_logprobs.0.token": "a", "choices.0.logprobs.content.0.top_logprobs.1.token": "b",
      "#choices.0.logprobs.content.0.top_logprobs": 2}),
    ("no text of the prompt unless asked for", CHAT, USER_AB | {"max_tokens": 1}, {"prompt_text": None}),
    ("the end of text is among the ids", COMPLETIONS, {"prompt": [A, EOS], "return_token_ids": True}, {"choices.0.token_ids": [A, EOS]}),
    ("max_tokens is clipped to the context", COMPLETIONS, AB | {"max_tokens": MAX_MODEL_LEN}, {"usage.total_tokens": MAX_MODEL_LEN}),
    ("null is the default", COMPLETIONS, AB | dict.fromkeys(["n", "stop", "seed", "temperature", "echo", "logit_bias"]), {"#choices": 1}),
    ("unknown fields are ignored", COMPLETIONS, AB | {"no_such_field": 1}, {"#choices": 1}),
    ("logprob_token_ids need logprobs", COMPLETIONS, AB | {"logprob_token_ids": [3], "logprobs": 0, "return_tokens_as_token_ids": True},
     {"choices.0.logprobs.top_logprobs.0.token_id:3": -9999.0}),
    ("an empty suffix is none", COMPLETIONS, AB | {"suffix": ""}, {"#choices": 1}),
    ("what is about routing, images or the account changes nothing", CHAT,
     USER_AB | {"session_id": "s", "mm_payload": "none", "store": True, "metadata": {"a": "b"}, "service_tier": "flex",
                "mm_processor_kwargs": {}, "routed_experts_prompt_start": 0, "verbosity": "medium"}, {"#choices": 1}),
    ("max_completion_tokens goes before max_tokens", CHAT, USER_AB | {"max_completion_tokens": 2, "max_tokens": 9},
     {"usage.completion_tokens": 2}),
]  # fmt: skip
IN = {"input": "ab", "max_output_tokens": 3}
RESPONSES_API: list[Row] = [
    ("a response is a list of items", RESPONSES, IN,
     {"object": "response", "#output": 1, "output.0.type": "message", "output.0.role": "assistant",
      "output.0.content.0.type": "output_text", "output.0.content.0.text": "aba"}),
    ("one that was cut short is incomplete", RESPONSES, IN,
     {"status": "incomplete", "incomplete_details.reason": "max_output_tokens", "output.0.status": "incomplete"}),
    ("one that the model ended is completed", RESPONSES, {"input": "a<|endoftext|>"},
     {"status": "completed", "incomplete_details": None, "output.0.content.0.text": "a", "error": None}),
    ("its usage has names of its own", RESPONSES, IN,
     {"usage.input_tokens": 2, "usage.output_tokens": 3, "usage.total_tokens": 5,
      "usage.input_tokens_details.cached_tokens": 0, "usage.prompt_tokens": ABSENT}),
    ("the input as messages, behind the instructions", RESPONSES,
     IN | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "b"}]}], "instructions": "a"},
     {"output.0.content.0.text": "aba", "instructions": "a"}),
    ("what was asked for is told again", RESPONSES, IN | {"metadata": {"k": "v"}, "temperature": 0.5, "store": False},
     {"metadata.k": "v", "temperature": 0.5, "store": False, "max_output_tokens": 3, "text.format.type": "text",
      "tool_choice": "auto", "tools": [], "previous_response_id": None, "background": False}),
    ("logprobs where they are included", RESPONSES, IN | {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
     {"#output.0.content.0.logprobs": 3, "output.0.content.0.logprobs.0.token": "a", "top_logprobs": 1}),
    ("numbered events, from the response to its text and back", RESPONSES, IN | STREAM,
     {"0.type": "response.created", "0.sequence_number": 0, "0.response.status": "in_progress",
      "1.type": "response.in_progress", "2.type": "response.output_item.added", "3.type": "response.content_part.added",
      "4.type": "response.output_text.delta", "4.delta": "a", "-2.type": "response.output_item.done",
      "-1.type": "response.incomplete", "-1.response.output.0.content.0.text": "aba"}),
]  # fmt: skip
ROWS = LOGPROBS + ECHO + STOP + STREAMING + ANSWERS + RESPONSES_API


def at(answer: Any, path: str) -> Any:
    for step in path.removeprefix("#").split("."):
        if isinstance(answer, list):
            answer = answer[int(step)]
        elif step not in answer:
            return ABSENT
        else:
            answer = answer[step]
    return len(answer) if path.startswith("#") else answer


def response_events(text: str) -> list[Any]:
    """Each says its name twice: as the event's, and as its type."""
    found = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [name.removeprefix("event: ") for name, _ in found] == [event["type"] for event in told]
    return told


@pytest.mark.parametrize(("behaviour", "path", "body", "wanted"), ROWS, ids=[row[0] for row in ROWS])
def test_behaviour(
    server: InProcessServer, behaviour: str, path: str, body: dict[str, Any], wanted: dict[str, Any]
) -> None:
    response = server.post(path, body, headers={"X-Request-Id": "me"})
    assert response.status_code == 200, response.text
    read = response_events if path == RESPONSES else events
    answer = read(response.text) if body.get("stream") else response.json()
    assert {place: at(answer, place) for place in wanted} == wanted


ERRORS: list[tuple[str, dict[str, Any], int, str, str]] = [
    # behaviour, body, status, type, param
    ("an unknown model", {"model": "other"}, 404, "NotFoundError", "model"),
    ("no text", {"prompt": ""}, 400, "BadRequestError", "prompt"),
    ("no prompts", {"prompt": []}, 400, "BadRequestError", "prompt"),
    ("texts and token ids mixed", {"prompt": ["a", [1]]}, 400, "Bad Request", "body.prompt"),
    ("an id out of the vocabulary", {"prompt": [EOS + 1]}, 400, "BadRequestError", "prompt"),
    ("a prompt that fills the context", {"prompt": "x" * MAX_MODEL_LEN}, 400, "BadRequestError", "prompt"),
    ("max_tokens above the context", {"max_tokens": MAX_MODEL_LEN + 1}, 400, "BadRequestError", "max_tokens"),
    ("max_tokens 0 without echo", {"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    ("too many logprobs", {"logprobs": 21}, 400, "BadRequestError", "logprobs"),
    ("too many stop strings", {"stop": list("abcde")}, 400, "Bad Request", "body.stop"),
    ("an empty stop string", {"stop": [""]}, 400, "BadRequestError", "stop"),
    ("several answers at temperature 0", {"n": 2, "temperature": 0}, 400, "BadRequestError", "n"),
    ("a suffix", {"suffix": "end"}, 400, "BadRequestError", "suffix"),
    ("what images would need", {"mm_processor_kwargs": {"num_crops": 4}}, 400, "BadRequestError", "mm_processor_kwargs"),
    ("routed experts", {"routed_experts_prompt_start": 1}, 400, "BadRequestError", "routed_experts_prompt_start"),
    ("stream_options without a stream", {"stream_options": {"include_usage": False}}, 400, "BadRequestError", "stream_options"),
    ("and of any other name", {"stream_options": {"other": 1}}, 400, "BadRequestError", "stream_options"),
    ("a stop token out of the vocabulary", {"stop_token_ids": [A, EOS + 1]}, 400, "BadRequestError", "stop_token_ids"),
    ("or below it", {"stop_token_ids": [-1]}, 400, "BadRequestError", "stop_token_ids"),
    ("no prompt at all", {"prompt": None}, 400, "BadRequestError", "prompt"),
    ("embeddings instead of a prompt", {"prompt": None, "prompt_embeds": "AAAA"}, 400, "BadRequestError", "prompt_embeds"),
    ("prompt_logprobs in a stream", {"stream": True, "prompt_logprobs": 1}, 400, "BadRequestError", "prompt_logprobs"),
    ("a wrong type", {"echo": [1]}, 400, "Bad Request", "body.echo"),
]  # fmt: skip


@pytest.mark.parametrize(("behaviour", "body", "status", "type", "param"), ERRORS, ids=[row[0] for row in ERRORS])
def test_error(
    server: InProcessServer, behaviour: str, body: dict[str, Any], status: int, type: str, param: str
) -> None:
    error = server.post(COMPLETIONS, AB | body).json()["error"]
    assert (error["code"], error["type"], error["param"]) == (status, type, param) and error["message"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (COMPLETIONS, {"prompt": [A, 300, 400]}, ["300", "400", "out of vocabulary", "257"]),
        (COMPLETIONS, {"prompt": [1000] * 60}, ["1000, ...", "257"]),
        (COMPLETIONS, AB | {"stop_token_ids": [-1]}, ["stop_token_ids", "-1", "257"]),
        (COMPLETIONS, AB | {"allowed_token_ids": [A, 300]}, ["allowed_token_ids", "300", "257"]),
        (COMPLETIONS, AB | {"logprobs": 1, "logprob_token_ids": [257]}, ["logprob_token_ids", "257"]),
        (CHAT, USER_AB | {"logit_bias": {"300": 1, "5": 1, "-7": 1}}, ["logit_bias", "300", "-7", "257"]),
        (CHAT, USER_AB | {"logit_bias": {"yes": 1, "5": 1, "1.5": 1}}, ["logit_bias", "'yes'", "'1.5'"]),
        (CHAT, USER_AB | {"logit_bias": {"y" * 5000: 1, str(10**40): 1}}, ["'yyy", "'1000"]),
        (COMPLETIONS, {"prompt": None}, ["Either prompt or prompt_embeds must be provided and non-empty."]),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": []}, ["Either prompt or prompt_embeds must be provided"]),
        (COMPLETIONS, {}, ["Either prompt or prompt_embeds must be provided"]),
    ],
    ids=str,
)
def test_an_error_names_what_was_wrong(
    server: InProcessServer, path: str, body: dict[str, Any], named: list[str]
) -> None:
    error = server.post(path, body).json()["error"]
    assert error["code"] == 400 and all(part in error["message"] for part in named) and len(error["message"]) < 300


@pytest.mark.parametrize("content", ["", "x" * MAX_MODEL_LEN])
def test_a_chats_prompt_is_called_messages(server: InProcessServer, content: str) -> None:
    error = server.post(CHAT, {"messages": [{"role": "user", "content": content}]}).json()["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "BadRequestError", "messages")


def test_flags_that_change_every_answer(make_server: Any) -> None:
    server = make_server(return_tokens_as_token_ids=True, enable_force_include_usage=True)
    body = AB | {"logprobs": 0, "max_tokens": 1}
    for wish, token in ((None, "token_id:64"), (True, "token_id:64"), (False, "a")):
        answer = server.post(COMPLETIONS, body | {"return_tokens_as_token_ids": wish}).json()
        assert answer["choices"][0]["logprobs"]["tokens"] == [token]
    for options in ({}, {"stream_options": {"include_usage": False}}):
        first, last = events(server.post(COMPLETIONS, body | STREAM | options).text)
        assert first["usage"]["total_tokens"] == 3 == last["usage"]["total_tokens"] and last["choices"] == []
    chunks = events(server.post(CHAT, USER_AB | STREAM | {"max_tokens": 2}).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]
    assert server.post(COMPLETIONS, body).json()["usage"]["total_tokens"] == 3


@given(prompt=st.text("aé€😀", min_size=1, max_size=8), interval=st.integers(1, 9), n=st.integers(1, 2))
def test_stream_interval(server: InProcessServer, prompt: str, interval: int, n: int) -> None:
    body = {"prompt": prompt, "n": n, "max_tokens": 30, "return_token_ids": True, "stream_interval": interval}
    whole = server.post(COMPLETIONS, body).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in events(server.post(COMPLETIONS, body | STREAM).text)]
    for answer in whole:
        mine = [choice for choice in chunks if choice["index"] == answer["index"]]
        assert "".join(choice["text"] for choice in mine) == answer["text"]
        sizes = [len(choice["token_ids"]) for choice in mine]
        assert sum(sizes) == 30 and all(size >= interval for size in sizes[1:-1])
        assert len(mine) <= 2 + 29 // interval


def test_the_servers_stream_interval_holds_where_no_request_has_its_own() -> None:
    config = byte_config()
    config = replace(config, scheduler_config=replace(config.scheduler_config, stream_interval=4))
    server = InProcessServer(config=config)
    try:
        body = AB | STREAM | {"max_tokens": 9}
        texts = [chunk["choices"][0]["text"] for chunk in events(server.post(COMPLETIONS, body).text)]
        assert texts[0] == "a" and all(len(text) >= 4 for text in texts[1:-1]) and len(texts) <= 4
        assert len(events(server.post(COMPLETIONS, body | {"stream_interval": 30}).text)) == 2
    finally:
        server.close()


def test_the_body_can_choose_the_id(server: InProcessServer) -> None:
    def answered(body: dict[str, Any], headers: dict[str, str]) -> str:
        return server.post(CHAT, USER_AB | {"max_tokens": 1} | body, headers=headers).json()["id"]

    assert answered({"request_id": "mine"}, {}) == "chatcmpl-mine"
    assert answered({"request_id": "mine"}, {"X-Request-Id": "header"}) == "chatcmpl-header"
    assert answered({"request_id": "mine"}, {"X-Request-Id": "not an id"}) == "chatcmpl-mine"
    assert "mine" not in answered({"request_id": None}, {})


def test_models_with_a_slash_at_the_end(server: InProcessServer) -> None:
    models = server.request("GET", "/v1/models").json()
    assert server.request("GET", "/v1/models/").json() == models and models["data"][0]["id"] == "byte-model"


def test_the_models_own_sampling_defaults() -> None:
    config = byte_config()
    defaults = {"temperature": 0.0, "top_k": 5, "max_tokens": 4}
    config = replace(config, model_config=replace(config.model_config, default_sampling_params=defaults))
    server = InProcessServer(config=config)
    try:
        for path, body in ((COMPLETIONS, AB), (CHAT, USER_AB)):
            for asked, tokens in ((None, 4), (9, 4), (2, 2)):
                assert server.post(path, body | {"max_tokens": asked}).json()["usage"]["completion_tokens"] == tokens
            assert server.post(path, body | {"n": 2}).json()["error"]["param"] == "n"  # greedy, as the model has it
            assert server.post(path, body | {"n": 2, "temperature": 0.5}).status_code == 200
        beams = server.post(COMPLETIONS, AB | {"n": 2, "use_beam_search": True})
        assert [len(choice["text"]) for choice in beams.json()["choices"]] == [4, 4]
    finally:
        server.close()
