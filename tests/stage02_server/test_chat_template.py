"""From messages to one prompt."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE
from server_under_test import InProcessServer, ServerProcess, events

from stage02_server.features.chat_template.framing import read_message, write_message
from stage02_server.features.chat_template.renderer import TemplateRenderer
from stage03_engine.errors import ConfigError, InvalidRequestError

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
def test_what_a_template_refuses_is_a_400(trusting: InProcessServer, template: str) -> None:
    response = trusting.post(CHAT, {"messages": MESSAGES, "chat_template": template})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("given", ["{{ unfinished", "no/such/file.jinja", "/"])
def test_an_unusable_template_is_a_config_error(make_server: Any, given: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template") as error:
        make_server(chat_template=given)
    assert "\n" not in str(error.value)


DUMP = "{{ [messages, tools, documents, add_generation_prompt, mood, reasoning_effort] | tojson }}"


def seen(server: InProcessServer, messages: list[dict[str, Any]] | None = None, **fields: Any) -> Any:
    """What a template sees, by way of /tokenize."""
    response = server.post("/tokenize", {"messages": messages or MESSAGES, **fields})
    assert response.status_code == 200, response.text
    prompt = server.post("/detokenize", {"tokens": response.json()["tokens"]}).json()["prompt"]
    return json.loads(prompt)


def test_templates_see_what_the_request_says(make_server: Any) -> None:
    server = make_server(chat_template=DUMP, default_chat_template_kwargs={"mood": "calm", "reasoning_effort": "low"})
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "b": 1, "a": "<é>"}}}
    assert seen(server) == [MESSAGES, None, None, True, "calm", "low"]
    fields = {
        "tools": [tool], "documents": [{"text": "x", "size": 10**30}], "add_generation_prompt": False, "reasoning_effort": "high",
        "chat_template_kwargs": {"mood": [1]},
    }  # fmt: skip
    assert seen(server, **fields) == [MESSAGES, [tool], [{"text": "x", "size": 10**30}], False, [1], "high"]
    server = make_server(chat_template="{{ tools | tojson }}")
    tokens = server.post("/tokenize", {"messages": MESSAGES, "tools": [tool]}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert list(json.loads(prompt)[0]["function"]["parameters"]) == ["type", "b", "a"]


def test_templates_see_calls_and_their_results(make_server: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}], "name": "f"},
        {"role": "user", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": ["a", {"type": "thinking", "thinking": "b"}], "reasoning_content": "So."},
    ]
    found = seen(make_server(chat_template="{{ messages | tojson }}"), messages)
    call["function"] = {"name": "f", "arguments": {"a": [1]}}
    assert found == [
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": "2", "name": "f"},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "a\nb", "reasoning": "So.", "reasoning_content": "So."},
    ]


@pytest.mark.parametrize("name", ["function_call", "audio", "tools", "task"])
def test_no_field_of_a_message_gets_lost(make_server: Any, name: str) -> None:
    server = make_server(chat_template="{{ messages | tojson }}")
    for value, status in ((None, 200), ([], 200), ({"name": "f"}, 400)):
        message = {"role": "assistant", "content": "a", name: value}
        response = server.post("/tokenize", {"messages": [message]})
        assert response.status_code == status
    assert response.json()["error"]["param"] == "messages" and name in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "asked", "parts"),
    [
        ("{{ messages[0].content | tojson }}", "auto", False),
        ("{{ messages[0].content | tojson }}", "openai", True),
        ("{% for p in messages[0]['content'] %}{% endfor %}{{ messages[0].content | tojson }}", "auto", True),
        ("{% set c = messages[0].content %}{% for p in c %}{% endfor %}{{ c | tojson }}", "auto", True),
        ("{% for p in messages[0]['content'] %}{% endfor %}{{ messages[0].content | tojson }}", "string", False),
    ],
)
def test_content_is_a_text_or_parts(make_server: Any, template: str, asked: str, parts: bool) -> None:
    server = make_server(chat_template=template, chat_template_content_format=asked)
    for content in ("a", [{"type": "text", "text": "a"}]):
        found = seen(server, [{"role": "user", "content": content}])
        assert found == ([{"type": "text", "text": "a"}] if parts else "a")


ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"


@pytest.mark.parametrize("last", ["Go", " Go ", "<user>"])
def test_an_answer_can_go_on_with_the_last_message(make_server: Any, last: str) -> None:
    server = make_server(chat_template=ROLES + "{% if add_generation_prompt %}<bot>{% endif %}")
    messages = [{"role": "user", "content": "Go"}, {"role": "poet", "content": last}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 5}
    prompt = "<user>Go<end><poet>" + last.strip()
    assert "".join(server.post("/tokenize", body | {"return_token_strs": True}).json()["token_strs"]) == prompt
    choice = server.post(CHAT, body).json()["choices"][0]
    assert choice["message"] == {"role": "poet", "content": "<user"}
    echoed = server.post(CHAT, body | {"echo": True}).json()["choices"][0]
    assert echoed["message"]["content"] == last + "<user"
    stream = events(server.post(CHAT, body | {"echo": True, "stream": True}).text)
    assert "".join(e["choices"][0]["delta"]["content"] for e in stream) == last + "<user"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template": ""}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "messages"),
        ({"messages": [{"role": "user", "content": ""}], "continue_final_message": True, "add_generation_prompt": False}, "messages"),
        ({"chat_template_kwargs": [1]}, "body.chat_template_kwargs"),
        ({"documents": "x"}, "body.documents"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_request_may_not_say(templated: InProcessServer, path: str, fields: dict[str, Any], param: str) -> None:
    content = json.dumps({"messages": MESSAGES} | fields)
    response = templated.request("POST", path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.fixture(scope="module")
def templated() -> Iterator[InProcessServer]:
    server = InProcessServer(chat_template=ROLES)
    yield server
    server.close()


def test_a_trusting_server_takes_a_template_from_a_request(make_server: Any) -> None:
    for given in (None, ROLES):  # also in place of nothing
        server = make_server(chat_template=given, trust_request_chat_template=True)
        asked = {"chat_template": "{{ messages | length }}{{ mood }}", "chat_template_kwargs": {"mood": "!"}}
        body = {"messages": MESSAGES, "return_token_strs": True}
        own = "".join(server.post("/tokenize", body).json()["token_strs"])
        assert "".join(server.post("/tokenize", body | asked).json()["token_strs"]) == "2!"
        assert "".join(server.post("/tokenize", body).json()["token_strs"]) == own
        assert server.post(CHAT, body | asked | {"max_tokens": 2}).json()["choices"][0]["message"]["content"] == "2!"
        for bad in ("{{ unfinished", "x" * 65_537):
            assert server.post(CHAT, body | {"chat_template": bad}).status_code == 400


GREEDY = {
    "a loop without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one operation without end": "{{ 7 ** (7 ** 9999999) }}",
    "constants at compile time": "{% if false %}{{ 7 ** (7 ** 9999999) }}{% endif %}",
    "a text without end": "{{ 'x' * 999999999999 }}",
    "a large prompt": "{{ 'x' * 20000000 }}",
    "many pieces": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a large number": "{{ '%0999999999d' % 1 }}",
}


@pytest.mark.slow(keep=("a loop", "a text", "many pieces", "a recursion", "a large number"))
@pytest.mark.parametrize("name", GREEDY)
def test_a_template_without_end_is_a_400_and_the_next_one_works(trusting: InProcessServer, name: str) -> None:
    async def all_at_once() -> list[httpx.Response]:
        bad = trusting.send("POST", CHAT, json={"messages": MESSAGES, "chat_template": GREEDY[name]})
        plain = trusting.send("POST", "/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        return await asyncio.gather(bad, plain)

    refused, answered = trusting.run(all_at_once())
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages", refused.text
    assert len(refused.json()["error"]["message"]) < 500
    assert answered.json()["choices"][0]["text"] == "ab"
    body = {"messages": MESSAGES, "max_tokens": 3}
    assert trusting.post(CHAT, body).json()["choices"][0]["message"]["content"] == "<sy"


@pytest.fixture(scope="module")
def trusting() -> Iterator[InProcessServer]:
    server = InProcessServer(chat_template=ROLES, trust_request_chat_template=True)
    yield server
    server.close()


def renderers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "stage02_server.features.chat_template.process" in p.cmdline()]


def test_a_renderer_that_was_killed_in_between_is_not_the_next_requests_fault(trusting: InProcessServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3}
    assert trusting.post(CHAT, body).status_code == 200
    for child in renderers():
        child.kill()
        child.wait(PATIENCE)
    assert trusting.post(CHAT, body).json()["choices"][0]["message"]["content"] == "<sy"


def test_a_renderer_that_was_stopped_holds_nobody_up() -> None:
    """It is replaced, and what it owed is rendered by the next one. One that is killed under a prompt is no other case."""
    before = renderers()
    renderer = TemplateRenderer("{{ word }}", silent_seconds=5)  # longer than a start takes
    renderer.start()
    (stopped,) = set(renderers()) - set(before)
    stopped.suspend()
    with contextlib.suppress(InvalidRequestError):  # on a busy machine the next one, too, may be silent for so long
        assert asyncio.run(renderer.render(None, '{"word": "on"}')) == "on"
    assert not stopped.is_running()
    del renderer
    assert not set(renderers()) - set(before)


def test_a_message_that_breaks_off_anywhere_is_the_end_of_the_pipe() -> None:
    """As when a process is killed while it answers: any other error would be a 500, and the process not replaced."""
    whole = io.BytesIO()
    write_message(whole, ["", "x" * 40])
    for size in range(len(whole.getvalue())):
        with pytest.raises(EOFError):
            read_message(io.BytesIO(whole.getvalue()[:size]))
    assert read_message(io.BytesIO(whole.getvalue())) == ["", "x" * 40]


def test_errors_show_no_address(trusting: InProcessServer) -> None:
    body = {"messages": MESSAGES, "chat_template": "{{ raise_exception(range ~ '') }}"}
    message = trusting.post(CHAT, body).json()["error"]["message"]
    assert "function" in message and "0x" not in message


def test_the_process_that_renders_ends_with_the_server() -> None:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--chat-template", ROLES)
    try:
        server.wait_until_ready()
        (child,) = psutil.Process(server.process.pid).children()
        assert "stage02_server.features.chat_template.process" in child.cmdline()
        server.process.kill()
        assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
    finally:
        server.close()
