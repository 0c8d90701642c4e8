"""A child that a test leaves is named, running or dead; one that was there before, or that was reaped, is not."""

from __future__ import annotations

import subprocess
import sys

import left_processes
import psutil
import pytest
from patience import PATIENCE, wait_until

WAIT = [sys.executable, "-c", "input()"]


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(WAIT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_a_child_is_named_until_somebody_waits_for_it() -> None:
    before = left_processes.children()
    child = start()
    assert left_processes.left(before) == [f"{child.pid} still runs: {sys.executable} -c 'input()'"]
    assert left_processes.left(left_processes.children()) == []
    child.kill()
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "it runs on")
    [line] = left_processes.left(before)
    assert line == f"{child.pid} has ended, and nobody waited for it: {sys.executable} -c 'input()'"
    child.wait(PATIENCE)
    assert left_processes.left(before) == []


def test_every_module_is_asked(request: pytest.FixtureRequest) -> None:
    assert "leaves_no_process" in request.fixturenames
