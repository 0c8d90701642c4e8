"""Two tiers: `make test` holds every promise in its cheapest form; `make test-all` (`pytest --all`) adds what is marked `slow`.

    @pytest.mark.slow                  the whole test is of the second tier
    @pytest.mark.slow(keep="eagle-2")  all its cases are, but those whose id in brackets contains one of these texts

A slow test that is asked for by its name (`pytest tests/x.py::test_y`) runs as any other.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests that are marked slow, as `make test-all` does")
    parser.addoption("--order", help="`reverse`, or a number: so the order is drawn (files, and the tests in them)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow(keep=...): only in `make test-all`, but for cases whose ids contain one of these texts"
    )


def is_slow(item: pytest.Item, unused: dict[tuple[str, str], str]) -> bool:
    """Takes out of `unused` what keeps the test. Raises UsageError for a mark that keeps nothing by its form."""
    for mark in item.iter_markers("slow"):
        keep = mark.kwargs.get("keep", ())
        texts = keep if isinstance(keep, tuple) else (keep,)
        if mark.args or {*mark.kwargs} - {"keep"} or not all(isinstance(text, str) and text for text in texts):
            raise pytest.UsageError(f"{item.nodeid}: slow takes keep=, one text or several")
        test, _, case = item.nodeid.partition("[")
        kept = [text for text in texts if text in case]
        for text in texts:
            unused.setdefault((test, text), item.nodeid)
        unused |= {(test, text): "" for text in kept}
        if not kept:
            return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if order := config.getoption("order"):
        items[:] = reordered(items, order)
    if config.getoption("all"):
        return
    asked = [argument.partition("::") for argument in config.args]
    named = [(config.invocation_params.dir / path, test) for path, _, test in asked if test]
    unused: dict[tuple[str, str], str] = {}
    slow = {item for item in items if not is_named(item, named) and is_slow(item, unused)}
    if wrong := [key for key, first in unused.items() if first]:  # a case that is slow by mistake goes unnoticed
        raise pytest.UsageError(f"no case has the text in its id that slow(keep=...) is to keep: {wrong}")
    config.hook.pytest_deselected(items=[*slow])
    items[:] = [item for item in items if item not in slow]


def is_named(item: pytest.Item, named: list[tuple[Path, str]]) -> bool:
    """Is it one of these (file, test), or a case of one?"""
    test = item.nodeid.partition("::")[2]
    return any(
        item.path == path and (test == name or test.startswith((f"{name}[", f"{name}::"))) for path, name in named
    )


def reordered(items: list[pytest.Item], order: str) -> list[pytest.Item]:
    """All processes must come to the same order. The tests of a file stay together."""
    if order == "reverse":
        return items[::-1]
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    drawn = random.Random(int(order))
    names = sorted(files)
    drawn.shuffle(names)
    for name in names:
        drawn.shuffle(files[name])
    return [item for name in names for item in files[name]]
