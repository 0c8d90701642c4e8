"""What the tests of the command line share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """A command sets variables for its whole process, which here is pytest's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
