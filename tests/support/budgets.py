"""What each test file costs in CPU seconds, against its budget in `tests/budgets.toml`.

Counted are this process, its children that have ended, and what those that still run have spent meanwhile: servers that tests share. Wall time
says how busy the machine is. A run that exceeds a budget fails, and names the file and its three dearest tests. Processors differ by two, and
two tests on one core slow each other down: a short loop says by how much a second is longer here, before and after each file.
What is not of a file is counted by itself: start-up and collection, what is shared by a session (fixtures), and fork servers.
"""

from __future__ import annotations

import json
import os
import resource
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[1] / "budgets.toml"
TICK = 1 / os.sysconf("SC_CLK_TCK")
LOOP_SECONDS = 0.0030
"""What `loop` takes on the machine of the table."""
NOISE = 1.25
"""By how much the same file differs from run to run, whatever it has beside it."""


def read_table() -> tuple[float, dict[str, float]]:
    """(seconds of a file that has no row, file -> seconds). A row is [seconds, why it may take more than the others]."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return table["seconds"], {name: float(seconds) for name, (seconds, _) in table["files"].items()}


def loop() -> float:
    """CPU seconds of a fixed piece of Python."""
    began, number = time.thread_time(), 0
    for each in range(60_000):
        number = (number * 31 + each) & 0xFFFF
    return time.thread_time() - began


def children(pid: int) -> list[int]:
    """By `/proc`; `psutil` would read all processes of the machine."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended, or this system has no such files
        pass
    return found


def living(pid: int) -> tuple[float, float]:
    """CPU seconds of (all that a process started and that still runs, of that the fork servers)."""
    total = forking = 0.0
    for child in children(pid):
        try:
            with open(f"/proc/{child}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{child}/cmdline") as file:
                is_fork_server = "fork_server.py" in file.read()
        except OSError:
            continue
        spent = sum(map(int, fields[11:15])) * TICK  # utime, stime, cutime, cstime of proc(5)
        below, forks = living(child)
        total += spent + below
        forking += spent if is_fork_server else forks
    return total, forking


def spent() -> tuple[float, float]:
    """CPU seconds of (this process and all that it started, of that the fork servers that still run)."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    total, forking = living(os.getpid())
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime + total, forking


class Meter:
    """In each process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.tests, self.factors = config, dict[str, float](), defaultdict[str, list[float]](list)
        self.shared, self.start = 0.0, 0.0

    def pytest_runtestloop(self) -> None:
        self.start = spent()[0]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope != "session":
            return (yield)
        before = spent()
        try:
            return (yield)
        finally:
            self.shared += _difference(before)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        file, shared, before = item.nodeid.partition("::")[0], self.shared, spent()
        if file not in self.factors:
            self.factors[file].append(loop() / LOOP_SECONDS)
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = max(0.0, _difference(before) - (self.shared - shared))
            if nextitem is None or nextitem.path != item.path:
                self.factors[file].append(loop() / LOOP_SECONDS)

    def result(self) -> dict[str, Any]:
        """What can be sent to the process that collects them."""
        factors = {file: max(1.0, sum(each) / len(each)) for file, each in self.factors.items()}
        rows = {"start-up and collection": self.start, "shared by a session": self.shared, "fork servers": spent()[1]}
        return {"tests": self.tests, "factors": factors, "rows": rows}


def _difference(before: tuple[float, float]) -> float:
    total, forking = spent()
    return total - before[0] - (forking - before[1])


class Account:
    """In the process that prints: the sums, and what is over its budget."""

    def __init__(self) -> None:
        self.tests, self.factors, self.rows = dict[str, float](), dict[str, float](), defaultdict[str, float](float)

    def add(self, result: dict[str, Any]) -> None:
        self.tests |= result["tests"]
        for file, factor in result["factors"].items():
            self.factors[file] = max(factor, self.factors.get(file, 1.0))
        for row, seconds in result["rows"].items():
            self.rows[row] += seconds

    @property
    def files(self) -> dict[str, float]:
        """File -> CPU seconds, the dearest first."""
        sums: dict[str, float] = defaultdict(float)
        for test, seconds in self.tests.items():
            sums[test.partition("::")[0]] += seconds
        return dict(sorted(sums.items(), key=lambda each: -each[1]))

    def over(self, seconds: float, table: dict[str, float]) -> list[str]:
        """A line for each file over its budget."""
        lines = []
        for file, cost in self.files.items():
            budget = NOISE * table.get(file.removeprefix("tests/"), seconds) * self.factors.get(file, 1.0)
            if cost > budget:
                lines.append(
                    f"{file} took {cost:.1f} CPU seconds, {budget:.1f} are its budget here; the dearest: {self.dearest(file)}"
                )
        return lines

    def dearest(self, file: str, most: int = 3) -> str:
        costs = sorted(
            ((cost, test) for test, cost in self.tests.items() if test.startswith(file + "::")), reverse=True
        )
        return ", ".join(f"{test.partition('::')[2]} {cost:.1f}" for cost, test in costs[:most])


METER, ACCOUNT = pytest.StashKey[Meter](), pytest.StashKey[Account]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="write a JSON file with the CPU seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("exercise", default=None) or config.option.collectonly:
        return
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.stash[METER] = Meter(config)
        config.pluginmanager.register(config.stash[METER], "cpu-meter")
    if not is_worker:
        config.stash[ACCOUNT] = Account()
        config.pluginmanager.register(Collector(config), "cpu-budgets")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The dearest files first: what begins last ends last, and all others wait for it. (In one process somebody reads along.)"""
    if hasattr(config, "workerinput") and not config.getoption("order"):
        seconds, table = read_table()
        items.sort(key=lambda item: -table.get(item.nodeid.partition("::")[0].removeprefix("tests/"), seconds))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker sends its part."""
    if (meter := session.config.stash.get(METER, None)) and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = meter.result()


class Collector:
    """Adds up what the workers send, and judges the whole."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.account = config, config.stash[ACCOUNT]
        self.over: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if result := getattr(node, "workeroutput", {}).get("cpu"):
            self.account.add(result)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if meter := self.config.stash.get(METER, None):
            self.account.add(meter.result())
        if path := self.config.getoption("costs"):
            path.write_text(
                json.dumps(
                    {"tests": self.account.tests, "rows": self.account.rows, "factors": self.account.factors}, indent=0
                )
            )
        whole = not any("::" in argument for argument in self.config.args)  # not tests by their names
        if whole and not self.config.getoption("all") and not self.config.option.markexpr.startswith("long"):
            self.over = self.account.over(*read_table())
        if self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files, rows = self.account.files, self.account.rows
        if len(files) > 1 or self.over:
            said = [
                f"{sum(files.values()):.0f} in {len(files)} files",
                *(f"{seconds:.0f} {row}" for row, seconds in rows.items()),
            ]
            terminalreporter.write_line(
                f"CPU seconds: {', '.join(said)}; {sum(files.values()) + sum(rows.values()):.0f} in all"
            )
        for line in self.over:
            terminalreporter.write_line(f"over its budget: {line}", red=True)
