"""Print what each benchmark found out besides its time: the ratios are the point."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run with --check-invariants; what is measured here should not."""
    monkeypatch.delenv("STAGES_CHECK_INVARIANTS")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for result in config._benchmarksession.benchmarks:
        for name, value in result.extra_info.items():
            for line in value if isinstance(value, list) else [f"{name} = {value}"]:
                terminalreporter.write_line(f"{result.name}: {line}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """They would be skipped; that they can be loaded is seen in `make test-all`."""
    asked = config.getoption("benchmark_only", default=False) or config.getoption("all", default=False)
    return True if collection_path.name.startswith("test_bench_") and not asked else None
