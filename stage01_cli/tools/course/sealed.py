"""The way of a verdict from the process of the tests to whoever waits for it: a pipe that has no name, and a seal on each line.

The key of the seals comes to the tests by a second pipe, before they load a line of a student's, and is used up by reading it. So a file that a student's part writes is no verdict, nor is a line without a seal, a line out of its turn, or an end before the last line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

KEY_BYTES = 32
PATIENCE = 10.0  # seconds
LARGEST = 1 << 20  # bytes that the tests may write


def seal(key: bytes, number: int, text: str) -> str:
    """Of the line with this number."""
    return hmac.new(key, f"{number}:{text}".encode(), hashlib.sha256).hexdigest()


class Reading:
    """The end of whoever waits: `descriptors` go to the process, whose tests write to the first, and read the key from the second."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._from, to = os.pipe()
        key, key_from_here = os.pipe()
        os.write(key_from_here, self.key)
        os.close(key_from_here)
        self.descriptors = (to, key)
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while some := os.read(self._from, 1 << 16):
            if len(self._bytes) <= LARGEST:
                self._bytes += some
        os.close(self._from)

    def num_so_far(self) -> tuple[int, int]:
        """(tests that have ended, tests in all) by the lines that came until now; (0, 0) before the first, or if one is not sealed."""
        whole, _, _ = bytes(self._bytes).decode("utf-8", "replace").rpartition("\n")
        try:
            lines = opened(self.key, whole)
        except ValueError:
            return 0, 0
        return sum("outcome" in line for line in lines), lines[0]["collected"] if lines else 0

    def lines(self) -> list[dict[str, Any]]:
        """What came, when the process has ended. Raises ValueError if not all of it is sealed."""
        for each in self.descriptors:
            os.close(each)
        self._reader.join(PATIENCE)  # somebody else may hold the other end
        if len(self._bytes) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        return opened(self.key, self._bytes.decode("utf-8", "replace"))


def opened(key: bytes, text: str) -> list[dict[str, Any]]:
    """The lines of a text, each with its seal in front of it. Raises ValueError for one that has another."""
    found = []
    for number, line in enumerate(text.splitlines()):
        mark, _, content = line.partition(" ")
        if not hmac.compare_digest(mark.encode(), seal(key, number, content).encode()):
            raise ValueError("a line that the judge has not written")
        found.append(json.loads(content))
    return found


def writer(descriptor: int, key_from: int) -> Callable[[dict[str, Any]], None]:
    """What the tests call for each line. Reads the key, which can be done once."""
    key, number = os.read(key_from, KEY_BYTES), 0
    os.close(key_from)

    def write(line: dict[str, Any]) -> None:
        nonlocal number
        text = json.dumps(line)
        content = f"{seal(key, number, text)} {text}\n".encode()
        number += 1
        while content:
            content = content[os.write(descriptor, content) :]

    return write
