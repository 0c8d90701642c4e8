"""Request fields that no model of a body has: refused by name, refused because a feature was taken out, or ignored."""

from __future__ import annotations

from typing import Any

import pytest

from stage03_engine.args.unknown import check_unknown_fields
from stage03_engine.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        ("request", {"suffix": "x"}, "suffix is not supported by this server; leave it out."),
        ("request", {"suffix": "", "audio": None, "tools": [], "nobody_knows_it": 1}, None),
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
