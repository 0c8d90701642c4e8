"""The page at `/docs`: what /openapi.json says, for people. It needs no script and no network (FastAPI's loads both from elsewhere)."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html
from starlette.responses import JSONResponse

from stage02_server.api_server import Services
from stage02_server.features.page.routes import content_policy, page_answer
from stage03_engine.mixins import load

router = APIRouter()
OPENAPI = "stage02_server.features.page.openapi:describe"  # imports all HTTP features, so it waits until somebody asks

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Routes - vLLM in stages</title>
<style>{style}</style>
</head>
<body class="docs">
<header><h1>Routes</h1> <a href="./">playground</a> <a href="openapi.json">openapi.json</a></header>
<main>
<section class="panel" aria-label="Routes">{routes}</section>
<section class="panel" aria-labelledby="shapes"><h2 id="shapes">Shapes</h2>{shapes}</section>
</main>
</body>
</html>
"""
_KINDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "object"}
_LIMITS = {
    "minimum": "at least {}", "maximum": "at most {}", "exclusiveMinimum": "above {}", "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters", "maxLength": "at most {} characters", "minItems": "at least {} items",
    "maxItems": "at most {} items",
}  # fmt: skip


@router.get("/openapi.json", include_in_schema=False)
async def show_openapi(raw_request: Request) -> Response:
    """The description of all routes; behind a proxy with the path that `--root-path` names."""
    root_path = raw_request.scope.get("root_path", "")
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return JSONResponse(load(OPENAPI)() | servers)


@router.get("/redoc", include_in_schema=False)
async def show_redoc(raw_request: Request) -> Response:
    """The same as a page whose script comes from the network."""
    return get_redoc_html(
        openapi_url=raw_request.scope.get("root_path", "") + "/openapi.json", title="vLLM in stages - ReDoc"
    )


@router.get("/docs", include_in_schema=False)
async def show_docs(raw_request: Request) -> Response:
    """Every route with its fields, and every shape that they refer to."""
    description = load(OPENAPI)()
    style = files("stage02_server.features.page").joinpath("static/page.css").read_text(encoding="utf-8")
    shapes = description["components"]["schemas"]
    routes = (
        _route(path, method, operation)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    )
    page = _PAGE.format(
        style=style,
        routes="".join(routes),
        shapes="".join(_shape(name, shape) for name, shape in sorted(shapes.items())),
    )
    return page_answer(page, content_policy(style))


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    fields = [
        _row(parameter["name"], parameter["schema"] | parameter, parameter.get("required", False))
        for parameter in operation.get("parameters", ())
    ]
    for body in operation.get("requestBody", {}).get("content", {}).values():
        schema = body["schema"]
        if "$ref" in schema:
            fields.append(_line("body", schema))
        else:
            fields.extend(_rows(schema))
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "$ref" in answer:
        fields.append(_line("answer", answer))
    words = escape(operation.get("description", ""))
    return (
        f'<h3 id="{escape(method + path)}"><span class="method">{method.upper()}</span> <code>{escape(path)}</code></h3>'
        f"<p>{words}</p>{_table(fields)}"
    )


def _shape(name: str, shape: dict[str, Any]) -> str:
    words = escape(shape.get("description", ""))
    return f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{words}</p>{_table(_rows(shape))}'


def _rows(shape: dict[str, Any]) -> list[str]:
    """The fields of a shape, those first that a request needs."""
    needed = shape.get("required", ())
    fields = sorted(shape.get("properties", {}).items(), key=lambda field: field[0] not in needed)
    return [_row(name, schema, name in needed) for name, schema in fields]


def _line(what: str, schema: dict[str, Any]) -> str:
    return f'<tr><th scope="row">{what}</th><td colspan="3">{_kind(schema)}</td></tr>'


def _table(rows: list[str]) -> str:
    return f'<div class="wide"><table><tbody>{"".join(rows)}</tbody></table></div>' if rows else ""


def _row(name: str, schema: dict[str, Any], needed: bool) -> str:
    given = schema.get("default")
    default = "needed" if needed else "" if given is None else f"{json.dumps(given)} if not given"
    cells = (_kind(schema), escape(default), escape(schema.get("description", "")))
    return (
        f'<tr><th scope="row"><code>{escape(name)}</code></th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """The type of a value in words, as HTML; null is left out, since every field may be."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(_kind(member) for member in schema[word] if member.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(escape(str(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        kind = f"list of {_kind(schema['items'])}" if schema.get("items") else "list"
    else:
        kind = "file" if schema.get("format") == "binary" else _KINDS.get(schema.get("type", ""), "anything")
    limits = [(words, schema[limit]) for limit, words in _LIMITS.items() if limit in schema]
    # The bounds of 32 and 64 bits are for programs.
    return ", ".join([kind, *(words.format(round(limit, 6)) for words, limit in limits if abs(limit) < 2**31)])


def install(app: FastAPI, services: Services) -> None:
    """Add the routes, unless `--disable-fastapi-docs` is given."""
    if not services.args.disable_fastapi_docs:
        app.include_router(router)
