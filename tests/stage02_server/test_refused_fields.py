"""Request fields that no model of a body has: refused by name, refused because a feature was taken out, or ignored."""

from __future__ import annotations

from typing import Any

import pytest
from server_under_test import InProcessServer

from stage03_engine.args.unknown import check_unknown_fields
from stage03_engine.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        ("request", {"suffix": "x"}, "suffix is not supported by this server; leave it out."),
        ("request", {"suffix": "", "audio": None, "tools": [], "nobody_knows_it": 1}, None),
        ("request", {"verbosity": "high", "modalities": ["audio"], "functions": [{}], "function_call": "auto"}, None),
        ("request", {"function_call": {"name": "f"}}, "function_call is not supported by this server; leave it out."),
        ("request+chat", {"suffix": "x", "web_search_options": {}}, None),
        ("request+chat", {"prompt_embeds": "x"}, "prompt_embeds is not supported by this server; leave it out."),
        ("messages", {"mcp_servers": [{}]}, "mcp_servers is not supported by this server; leave it out."),
        ("messages", {"mcp_servers": [], "best_of": 2, "context_management": {"edits": []}}, None),
        ("pooling", {"endianness": "big"}, "endianness is not supported by this server; leave it out."),
        ("pooling", {"endianness": "little", "best_of": 2}, None),
    ],
)
def test_what_is_refused(table: str, fields: dict[str, Any], message: str | None) -> None:
    if message is None:
        check_unknown_fields(fields, table)
        return
    with pytest.raises(InvalidRequestError) as refusal:
        check_unknown_fields(fields, table)
    assert str(refusal.value) == message and refusal.value.param in fields


@pytest.mark.parametrize("table", ["request", "messages", "pooling"])
def test_a_house_with_a_room_less_refuses_what_it_does_not_know(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell any more which fields the room had."""
    monkeypatch.setattr("stage03_engine.plugins.INDEX", ("stage02_server.features.gone",))
    check_unknown_fields({"best_of": 0, "tools": [], "echo": False, "user_name": None}, table)
    with pytest.raises(
        InvalidRequestError, match=r"^best_of is unknown here, where gone is not installed; leave it out\.$"
    ):
        check_unknown_fields({"best_of": 2}, table)


def test_what_vllm_ignores_is_told_to_the_log_once(
    server: InProcessServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage03_engine.args.features.refused_flags.refused._told", set())
    ignored = {"verbosity": "high", "suffix": "x", "audio": {"voice": "alloy"}, "modalities": ["text", "audio"]}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    plain = server.post("/v1/chat/completions", body).json()["choices"]
    for _ in range(2):
        answer = server.post("/v1/chat/completions", body | ignored)
        assert answer.status_code == 200 and answer.json()["choices"] == plain
    assert sorted(caplog.messages) == [f"The request field {name} does nothing here." for name in sorted(ignored)]
