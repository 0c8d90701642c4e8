"""A limit to texts that no context bounds, as they are tokenized and go no further."""

from __future__ import annotations

from stage02_server.features.hardening.manifest import HardeningFlags
from stage03_engine.errors import InvalidRequestError


def check_length(args: HardeningFlags, text: str, field: str) -> None:
    """Raises InvalidRequestError that blames `field` for a text that is too long."""
    if len(text) > args.max_tokenize_characters:
        raise InvalidRequestError(
            f"At most {args.max_tokenize_characters} characters are tokenized without the engine, got {len(text)}; see "
            "--max-tokenize-characters.",
            field,
        )
