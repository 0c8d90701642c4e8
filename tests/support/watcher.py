"""A client of GET /v1/engine/events that keeps what it hears."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
from patience import PATIENCE


class Watcher:
    """A client that reads the stream in a thread."""

    def __init__(self, url: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.text = ""
        self.ended = threading.Event()
        self._grew = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(url + "/v1/engine/events",), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("GET", url) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                for line in response.iter_lines():
                    with self._grew:
                        self.text += line + "\n"
                        if line.startswith("data: "):
                            self.events.append(json.loads(line[6:]))
                        self._grew.notify_all()
        except httpx.HTTPError:
            pass  # the server was killed
        finally:
            self.ended.set()

    def named(self, name: str, proc: str | None = None) -> list[dict[str, Any]]:
        """The events of this name so far, of all processes or of one."""
        return [event for event in self.events if event["name"] == name and proc in (None, event["proc"])]

    def wait_for(self, name: str, count: int = 1, proc: str | None = None) -> None:
        with self._grew:
            assert self._grew.wait_for(lambda: len(self.named(name, proc)) >= count, timeout=PATIENCE), name
