"""How long a server stands still for everybody else: the measure of an attack.

A process of its own asks `GET /health` again and again, on one connection, and remembers the longest wait. It shares nothing with the
test that attacks, whose own work must not be taken for the server's.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

LONGEST = 0.25
"""Seconds. What no attack may exceed; asserted in `long` tests only, as it depends on the machine."""

_LOOP = """
import http.client, sys, threading, time
host, port = sys.argv[1:]
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
connection, longest, first = http.client.HTTPConnection(host, int(port)), 0.0, True
while not over.is_set():
    start = time.monotonic()
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except (ConnectionError, http.client.HTTPException):
        connection.close()  # the server closes idle connections: ask again on a new one, the wait goes on
        connection.request("GET", "/health")
        connection.getresponse().read()
    longest = max(longest, time.monotonic() - start)
    if first:
        print("asking", flush=True)
        first = False
    over.wait(0.005)
print(longest)
"""


class Standstill:
    """While the block runs, /health is asked for; afterwards `seconds` is the longest wait for an answer.

    The block begins when the first answer is there.
    """

    def __init__(self, url: str) -> None:
        self.seconds = 0.0
        host, _, port = url.rpartition("//")[2].rpartition(":")
        self._command = [sys.executable, "-S", "-c", _LOOP, host, port]

    def __enter__(self) -> Standstill:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "asking\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate()
        if kind is None:
            self.seconds = float(output)
