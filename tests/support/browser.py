"""A real Chromium without a window, for the tests of pages: the one that is on the machine, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
ARGS = [
    "--no-sandbox",  # a test run may be root's
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",  # the browser itself asks nobody for anything either
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running browser, one per module; a test module says `pytest_plugins = ["browser"]`.
    Without a Chromium the tests are skipped, but
    fail where the environment says CI: there they must not be left out unnoticed."""
    path = find_chromium()
    if path is None:
        reason = f"no Chromium on this machine (looked for {', '.join(NAMES)})"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield running
        running.close()


@pytest.fixture
def script(browser: Any) -> Iterator[Any]:
    """The server's page without a server: only its script runs."""
    from stage02_server.features.page.routes import build_page

    context = browser.new_context()
    page = context.new_page()
    page.set_content(build_page()[0])
    page.uncheck("#watch")  # there is nobody to listen to
    page.evaluate("say('watching')")
    yield page
    context.close()
