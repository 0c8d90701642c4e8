"""The flag of the usage in streams."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class StreamUsageFlags:
    """Whether every stream ends with the usage."""

    enable_force_include_usage: bool = option(
        False, "tell the usage in every chunk of every stream and at its end, asked for or not"
    )
