"""The flag of the pages for browsers."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class PageFlags:
    """What browsers are shown."""

    disable_fastapi_docs: bool = option(False, "no /docs, /redoc and /openapi.json")
