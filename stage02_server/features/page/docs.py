"""`/openapi.json`, and the same for people: `/docs` (Swagger UI) and `/redoc`.

FastAPI's own pages load their scripts from the internet. Here these come from the package fastapi-offline, so the pages also work
without a network. vLLM has both, by `--enable-offline-docs`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html

from stage02_server.api_server import Services
from stage02_server.errors import not_found
from stage03_engine.args.command import signals_are_ours

router = APIRouter()
# One thread: if many ask at the same time, the first one does the work.
DESCRIBER = ThreadPoolExecutor(1, "describe")
TITLE = "vLLM in stages"
OPENAPI = "stage02_server.features.page.openapi"  # imports all HTTP features, so it waits until somebody asks
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "redoc.standalone.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
SILENT_SECONDS = 120.0  # after which the process has been stopped, or gets no turn
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _root_path(raw_request: Request) -> str:
    return raw_request.scope.get("root_path", "")


@router.get("/openapi.json", include_in_schema=False)
async def show_openapi(raw_request: Request) -> Response:
    """The description of all routes; behind a proxy with the path that `--root-path` names."""
    loop = asyncio.get_running_loop()
    content = await loop.run_in_executor(DESCRIBER, _openapi, _root_path(raw_request))
    return Response(content, media_type="application/json")


@cache
def _openapi(root_path: str) -> bytes:
    """Takes seconds: it imports what this server has not needed so far. So it runs in a process of its own: a thread would
    share the interpreter with the event loop, and hold it for tens of milliseconds at a time."""
    command = [sys.executable, "-m", OPENAPI, root_path]
    with signals_are_ours():
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SILENT_SECONDS)
    if made.returncode:
        raise RuntimeError(f"the description was not made: {made.stderr.decode(errors='replace')[-2000:]}")
    return made.stdout


def _begin(raw_request: Request) -> str:
    """Describe the routes while the browser still reads the page and its scripts, which ask for the description last."""
    root_path = _root_path(raw_request)
    DESCRIBER.submit(_openapi, root_path)
    return root_path


@cache
def _asset(name: str) -> bytes:
    return files("fastapi_offline").joinpath("static", name).read_bytes()


@router.get("/docs", include_in_schema=False)
async def show_docs(raw_request: Request) -> Response:
    """Swagger UI: every route with its fields, and a form to try it."""
    root_path = _begin(raw_request)
    page = get_swagger_ui_html(
        openapi_url=f"{root_path}/openapi.json",
        title=TITLE,
        swagger_js_url=f"{root_path}/docs/swagger-ui-bundle.js",
        swagger_css_url=f"{root_path}/docs/swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    page.headers["Content-Security-Policy"] = POLICY
    return page


@router.get("/redoc", include_in_schema=False)
async def show_redoc(raw_request: Request) -> Response:
    """ReDoc: the same to read."""
    root_path = _begin(raw_request)
    page = get_redoc_html(
        openapi_url=f"{root_path}/openapi.json",
        title=TITLE,
        redoc_js_url=f"{root_path}/docs/redoc.standalone.js",
        redoc_favicon_url="data:,",
        with_google_fonts=False,
    )
    page.headers["Content-Security-Policy"] = POLICY
    return page


@router.get("/docs/{asset}", include_in_schema=False)
def show_asset(asset: str) -> Response:
    """A script or style of these pages. Raises APIError 404 for any other name."""
    if asset not in ASSETS:
        raise not_found(f"/docs has no {asset}.")
    return Response(_asset(asset), media_type=ASSETS[asset], headers={"Cache-Control": "max-age=86400"})


def install(app: FastAPI, services: Services) -> None:
    """Add the routes, unless `--disable-fastapi-docs` is given."""
    if not services.args.disable_fastapi_docs:
        app.include_router(router)
