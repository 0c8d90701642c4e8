"""The flag of the pages for browsers."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class PageFlags:
    """What browsers are shown."""

    disable_fastapi_docs: bool = option(False, "no /docs, /redoc and /openapi.json")
    enable_engine_events: bool = option(
        False,
        "answer GET /v1/engine/events, and so the live view of the page, also with more than one API key: each key then sees "
        "how many requests run, how long they are, and hashes of their ids",
    )


FEATURE = Feature(
    name="page",
    help="what a browser sees: the page at /, and /docs",
    room=__package__,
    settings={"FrontendArgs": PageFlags},
    parts=(
        Part("server", ".link:say_where", key="link"),
        Part("routes", ".routes:install", paths={"/": "", "/favicon.ico": "", "/v1/engine/events": ""}, late=True),
        Part(
            "routes",
            ".docs:install",
            paths={"/openapi.json": "", "/docs": "", "/redoc": "", "/docs/{asset}": ""},
            late=True,
        ),
    ),
)
