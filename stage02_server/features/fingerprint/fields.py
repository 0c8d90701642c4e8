"""The field `system_fingerprint` of answers (vllm/entrypoints/openai/completion/protocol.py)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SystemFingerprintField(BaseModel):
    """A stream has it beside the usage, at its end."""

    system_fingerprint: str | None = Field(
        default=None, description="Answers with the same seed can only be compared while this stays the same."
    )
