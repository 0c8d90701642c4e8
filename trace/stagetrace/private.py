"""Files that may hold what clients wrote and were answered are for their owner alone."""

from __future__ import annotations

import os

FILE_MODE, FOLDER_MODE = 0o600, 0o700  # of what is new: what was there before keeps its own


def private(path: str, flags: int) -> int:
    """The `opener` of `open`: nobody else may read a file that it creates."""
    return os.open(path, flags, FILE_MODE)
