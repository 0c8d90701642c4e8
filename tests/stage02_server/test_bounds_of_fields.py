"""What pydantic checks is refused as vLLM refuses it: type "Bad Request", `param` "body.<field>", and pydantic's own words for the bound.

Every bound is found in the schema of every route that takes JSON, and stepped over.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import pytest
from endpoints import ENDPOINTS, ask
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from server_under_test import InProcessServer

from stage02_server.features.page.openapi import describe
from stage02_server.protocol import RequestModel

BEYOND = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 0}
KEYWORDS: dict[str, tuple[Any, str]] = {  # of JSON schema -> what pydantic checks, and its name there
    "minimum": (int, "ge"), "maximum": (int, "le"), "exclusiveMinimum": (int, "gt"), "exclusiveMaximum": (int, "lt"),
    "minLength": (str, "min_length"), "maxLength": (str, "max_length"), "maxItems": (list, "max_length"),
}  # fmt: skip
EMPTY = ("minLength", 0)  # a bound that nothing steps over
IN_VLLM: list[tuple[str, str, int]] = [  # of completions and chats, in its openapi.json
    ("seed", "maximum", 2**63 - 1), ("seed", "minimum", -(2**63)), ("stop", "maxItems", 4), ("truncate_prompt_tokens", "minimum", -1),
    ("truncate_prompt_tokens", "maximum", 2**63 - 1), ("priority", "maximum", 2**63 - 1), ("priority", "minimum", -(2**63)),
    ("cache_salt", "minLength", 1), ("cache_salt", "maxLength", 1024), ("stream_interval", "minimum", 1),
]  # fmt: skip


def bounds(schema: dict[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """(keyword, bound, whether it is one of the items) of a field, in all its forms. Lists of objects are left out."""
    for form in schema.get("anyOf", [schema]):
        items = form.get("items", {})
        told = {} if "$ref" in items else form
        yield from ((keyword, told[keyword], False) for keyword in KEYWORDS if keyword in told)
        if items:
            yield from ((keyword, bound, True) for keyword, bound, of_items in bounds(items) if not of_items)


def body_classes() -> Iterator[tuple[str, type[BaseModel]]]:
    """The class of each route's body. FastAPI's own description would not do: its bounds are floats."""
    description, waiting, classes = describe(), [RequestModel], dict[str, type[BaseModel]]()
    while waiting:
        kind = waiting.pop()
        classes[kind.__name__] = kind
        waiting += kind.__subclasses__()
    for path in ENDPOINTS:
        content = description["paths"][path]["post"]["requestBody"]["content"]
        if "application/json" in content:
            yield path, classes[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]


@cache
def all_bounds() -> list[tuple[str, str, str, int, bool, bool]]:
    found = []
    for path, kind in body_classes():
        for field, schema in kind.model_json_schema()["properties"].items():
            of_texts = "string" in str(schema)
            found += [(path, field, *bound, of_texts) for bound in dict.fromkeys(bounds(schema)) if bound[:2] != EMPTY]
    return found


def beyond(keyword: str, bound: int, of_items: bool, of_texts: bool) -> tuple[Any, Any]:
    """A value that the bound forbids, as a whole and alone."""
    if keyword in BEYOND:
        value: Any = bound + BEYOND[keyword]
    else:
        size = bound - 1 if keyword == "minLength" else bound + 1
        value = "x" * size if keyword != "maxItems" else ["x" if of_texts else 1] * size
    return ([value] if of_items else value), value


def words(keyword: str, bound: int, value: Any) -> str:
    kind, name = KEYWORDS[keyword]
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Annotated[kind, Field(**{name: bound})]).validate_python(value)
    return caught.value.errors()[0]["msg"]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[Any, InProcessServer]]:
    made: dict[Any, InProcessServer] = {}
    yield made
    for server in made.values():
        server.close()


def test_a_bound_is_told_in_pydantics_words(servers: dict[Any, InProcessServer]) -> None:
    for path, field, keyword, bound, of_items, of_texts in all_bounds():
        config = ENDPOINTS[path].config
        if config not in servers:
            servers[config] = InProcessServer(config=config())
        sent, alone = beyond(keyword, bound, of_items, of_texts)
        response = ask(servers[config], path, **{field: sent})
        error = response.json()["error"]
        assert response.status_code == 400 and words(keyword, bound, alone) in error["message"], (path, field)
        if "param" in error:  # not in Anthropic's errors
            assert (error["type"], error["param"], error["code"]) == ("Bad Request", f"body.{field}", 400)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_the_bounds_are_vllms(path: str) -> None:
    assert set(IN_VLLM) <= {(field, keyword, bound) for at, field, keyword, bound, *_ in all_bounds() if at == path}


def test_the_least_and_the_greatest_are_served(server: InProcessServer) -> None:
    """Nothing behind pydantic is stricter than what it says."""
    for field, keyword, bound in IN_VLLM:
        if field in ("seed", "priority", "stream_interval") or keyword in ("maxItems", "maxLength"):
            value: Any = ["x"] * bound if keyword == "maxItems" else "x" * bound if keyword == "maxLength" else bound
            response = ask(server, "/v1/completions", n=1, **{field: value})
            assert response.status_code == 200, (field, value, response.text)
