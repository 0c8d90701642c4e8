"""Arguments of a request for the user's own logits processors."""

from __future__ import annotations

from typing import Any


class ExtraArgs:
    """Part of SamplingParams."""

    __slots__ = ()
    extra_args: dict[str, Any] = {}
