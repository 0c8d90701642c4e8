"""Where `CI` is set, a run fails that leaves a file in the project's folder, or changes one. (Elsewhere somebody may be working there.)"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

BEFORE = pytest.StashKey[set[str]]()


def changed(folder: Path) -> set[str]:
    """A line for each file that git does not know as it is; nothing where there is no checkout."""
    command = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=all"]
    try:
        return {*subprocess.run(command, capture_output=True, text=True).stdout.splitlines()}
    except OSError:
        return set()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.stash[BEFORE] = changed(config.rootpath)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(BEFORE, None)
    if before is not None and (left := changed(session.config.rootpath) - before):
        session.config.stash[LEFT] = left
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


LEFT = pytest.StashKey[set[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in sorted(config.stash.get(LEFT, set())):
        terminalreporter.write_line(f"left in the project's folder: {line}", red=True)
