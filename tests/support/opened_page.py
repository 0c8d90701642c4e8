"""The server's page, opened in the browser of the tests."""

from __future__ import annotations

import time
from typing import Any

from patience import PATIENCE


class Opened:
    """The page in the browser, and all that went wrong on it."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}} | context)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        self.requests: list[Any] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector("option", state="attached")

    def until(self, expression: str) -> None:
        """Wait until this is true on the page (which forbids to evaluate strings itself)."""
        deadline = time.monotonic() + PATIENCE
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            self.page.wait_for_timeout(20)

    def send(self, prompt: str, **fields: str) -> None:
        self.page.fill("[name=prompt]", prompt)
        for name, value in fields.items():
            self.page.fill(f"[name={name}]", value)
        self.page.press("[name=prompt]", "Control+Enter")

    def answer(self) -> str:
        """The text of the last answer, when it is complete."""
        self.until("document.getElementById('summary').textContent.includes('ended:')")
        return str(self.page.locator(".words").last.text_content())
