"""Processes of tests begin with the files that take longest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import longest_first

TESTS = Path(__file__).parent


def test_each_file_of_the_list_is_there_and_stands_once() -> None:
    assert [name for name in longest_first.LONGEST if not (TESTS / name).is_file()] == []
    assert len({*longest_first.LONGEST}) == len(longest_first.LONGEST)


PLUGIN = """
import longest_first, pytest
longest_first._places["test_longest_first.py"] = -1

@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers():
    return 1
"""


def test_the_only_process_begins_with_the_longer_file(tmp_path: Path) -> None:
    """As the Makefile calls pytest, with two files in the wrong order."""
    words = re.search(r"-n logical .*(?= \$\(ARGS\))", (TESTS.parent / "Makefile").read_text())
    assert words
    (tmp_path / "no_core.py").write_text(PLUGIN)
    asked = [
        str(TESTS / "notebooks/test_alarms.py"),
        f"{__file__}::{test_each_file_of_the_list_is_there_and_stands_once.__name__}",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no_core", *words[0].split(), "-vv", *asked],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    ran = re.findall(r"^\[(gw\d+)\].* PASSED \S*?(test_\w+\.py)::", ended.stdout, re.MULTILINE)
    assert len(ran) > 2  # the shorter file has more tests
    assert ran == [("gw0", "test_longest_first.py")] + [("gw0", "test_alarms.py")] * (len(ran) - 1)
