"""Request fields that are known and refused; the list is read when a request has a field that its model does not have."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from stage03_engine.errors import InvalidRequestError


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("stage02_server.features").joinpath("refused_fields.toml").read_text(encoding="utf-8"))


def check_unknown_fields(fields: dict[str, Any], table: str) -> None:
    """`fields` are those that the model of the request does not have. Raises InvalidRequestError for one of `table`, or of a
    feature that was taken out, that asks for something; fields that nobody knows are ignored, as in vLLM."""
    refused, features = _tables()[table], _tables()["feature"]
    for name, value in fields.items():
        if value is None:
            continue
        if name in refused:
            if value not in refused[name]:
                raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name)
        elif table == "request" and name in features and value not in (False, [], {}):
            raise InvalidRequestError(f"{name} belongs to {features[name]}, which is not installed.", name)
