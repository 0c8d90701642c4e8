"""Each test file has a budget, a run that exceeds one fails and says why, and processes of tests begin with the dearest files."""

from __future__ import annotations

import re
from pathlib import Path

import budgets
import pytest

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parent
DEAR = """
import subprocess, sys, time, pytest

WORK = "import time\\nend = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"

def test_that_starts_a_process():
    subprocess.run([sys.executable, "-c", WORK])

@pytest.fixture(scope="session")
def shared():
    exec(WORK)

def test_that_shares(shared): pass

@pytest.mark.slow(keep=("one", "ne"))
@pytest.mark.parametrize("case", ["one", "three"])
def test_cases(case): pass

@pytest.mark.slow
def test_slow(): pass
"""
PLUGINS = ("-p", "tiers", "-p", "budgets", "-p", "no:schemathesis", "-v")


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Two test files, and a table without rows."""
    pytester.makepyfile(test_cheap="def test_it(): pass\ndef test_again(): pass", test_dear=DEAR)
    table = pytester.path / "budgets.toml"
    table.write_text("seconds = 0.05\n[files]\n")
    monkeypatch.setattr(budgets, "TABLE", table)
    return pytester


def test_each_row_is_of_a_file_that_is_there_and_needs_it() -> None:
    seconds, rows = budgets.read_table()
    assert [name for name in rows if not (TESTS / name).is_file()] == []
    assert [name for name in rows if rows[name] <= seconds] == []


def over(ended: pytest.RunResult) -> list[tuple[str, str]]:
    """(file, its dearest test) that a run names."""
    return re.findall(r"^over its budget: (\S+) took .* the dearest: (\S+) ", ended.stdout.str(), re.MULTILINE)


def test_a_file_over_its_budget_fails_the_run(files: pytest.Pytester) -> None:
    """What its processes spend counts, and what a session shares does not."""
    ended = files.runpytest_inprocess(*PLUGINS)
    ended.assert_outcomes(passed=5, deselected=2)
    assert over(ended) == [("test_dear.py", "test_that_starts_a_process")] and ended.ret == 1
    ended = files.runpytest_inprocess(*PLUGINS, "-k", "not process")
    assert not over(ended) and ended.ret == 0
    (files.path / "budgets.toml").write_text('seconds = 0.05\n[files]\n"test_dear.py" = [7, "it works"]')
    assert files.runpytest_inprocess(*PLUGINS).ret == 0


def test_processes_of_tests_send_what_they_spent_and_begin_with_the_dearest(
    files: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files.path / "no_rows.py").write_text("import budgets, pathlib\nbudgets.TABLE = pathlib.Path('budgets.toml')")
    (files.path / "budgets.toml").write_text('seconds = 0.05\n[files]\n"test_dear.py" = [0.06, "it works"]')
    monkeypatch.setenv("PYTHONPATH", f"{files.path}:{TESTS / 'support'}")
    ended = files.runpytest_subprocess(
        *PLUGINS, "-p", "no_rows", "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder"
    )
    ran = re.findall(r"PASSED (test_\w+)\.py", ended.stdout.str())
    assert ran == ["test_dear"] * 3 + ["test_cheap"] * 2
    assert over(ended) == [("test_dear.py", "test_that_starts_a_process")] and ended.ret == 1


def test_what_is_slow_runs_when_asked_for(files: pytest.Pytester) -> None:
    for flags, ran in (
        ((), ["test_cases[one]"]),
        (("--all",), ["test_cases[one]", "test_cases[three]", "test_slow"]),
        (("test_dear.py::test_slow",), ["test_slow"]),
    ):
        ended = files.runpytest_inprocess(*PLUGINS, *flags, "-k", "slow or cases")
        assert re.findall(r"::(\S+) PASSED", ended.stdout.str()) == ran


@pytest.mark.parametrize(
    "mark", ["slow('one')", "slow(keep=1)", "slow(keep='')", "slow(reason='it is')", "slow(keep='b')"]
)
def test_a_mark_that_keeps_nothing_is_refused(mark: str, pytester: pytest.Pytester) -> None:
    cases = '@pytest.mark.parametrize("case", ["a"])'
    pytester.makepyfile(f"import pytest\n@pytest.mark.{mark}\n{cases}\ndef test_it(case): pass")
    assert pytester.runpytest_inprocess(*PLUGINS).ret == pytest.ExitCode.USAGE_ERROR
