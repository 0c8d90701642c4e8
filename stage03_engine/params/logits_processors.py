"""What a request tells logits processors of the user's own."""

from __future__ import annotations

from typing import Any


class ExtraArgs:
    """Part of SamplingParams."""

    __slots__ = ()
    extra_args: dict[str, Any] = {}
