"""What a user of recordings can fix."""

from __future__ import annotations


class TraceError(ValueError):
    """A recording that cannot be read, or a question that it cannot answer; the message is one line and says what to do."""
