"""The flags of `system_fingerprint`."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class FingerprintFlags:
    """By what clients see that answers come from another set-up."""

    fingerprint_mode: str = option(
        "full",
        "what system_fingerprint in answers tells: version, parallel sizes and a hash of the settings (full), no sizes (hash), "
        "--fingerprint-value (custom), or nothing (none)",
        ("full", "hash", "custom", "none"),
    )
    fingerprint_value: str | None = option(None, "the system_fingerprint of --fingerprint-mode custom")

    def check(self) -> None:
        """Raises ConfigError for a value that nobody sees, and for a mode that lacks it."""
        if (self.fingerprint_mode == "custom") != bool(self.fingerprint_value):
            raise ConfigError("--fingerprint-mode custom and --fingerprint-value TEXT need each other")
        if (
            self.fingerprint_value and not self.fingerprint_value.isprintable()
        ):  # also what is no Unicode: it could not be sent
            raise ConfigError("--fingerprint-value must be printable text on one line")


_FIELD = ".fields:SystemFingerprintField"

FEATURE = Feature(
    name="fingerprint",
    help="system_fingerprint: which set-up answered",
    room=__package__,
    settings={"FrontendArgs": FingerprintFlags},
    parts=(
        *(
            Part("response", _FIELD, key=answer)
            for answer in ("CompletionResponse", "ChatCompletionResponse", "ChatStreamResponse")
        ),
        Part("answers", ".install:install"),
    ),
)
