"""refused.toml knows the request fields of every feature, so that one of a feature that was taken out is refused by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from stage02_server.protocol_types import RequestFields
from stage03_engine.args.refused import check_unknown_fields, refused_toml
from stage03_engine.errors import InvalidRequestError

FEATURES = Path(__file__).parent.parent.parent / "stage02_server" / "features"


def declared(feature: str) -> set[str]:
    """The fields of the mixins in a feature's fields.py."""
    module = import_module(f"stage02_server.features.{feature}.fields")
    own = [part for part in vars(module).values() if isinstance(part, type) and part.__module__ == module.__name__]
    return {field for part in own if issubclass(part, RequestFields) for field in part.model_fields}


def test_every_field_of_a_feature_is_listed() -> None:
    listed: dict[str, set[str]] = {}
    for field, feature in refused_toml()["fields"]["feature"].items():
        listed.setdefault(feature, set()).add(field)
    names = [path.parent.name for path in FEATURES.glob("*/fields.py")]
    assert listed == {name: declared(name) for name in names if declared(name)}


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        ("request", {"suffix": "x"}, "suffix is not supported by this server; leave it out."),
        ("request", {"best_of": 2}, "best_of belongs to the feature sampling, which is not installed."),
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
