"""No secrets in a recording: what may be one, in a command line or an environment, is replaced before it is written."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

HIDDEN = "***"
_SECRET_NAME = re.compile(r"key|secret|passw|credential|hash.?seed|token(?!i[sz])", re.IGNORECASE)
_COUNTS_TOKENS = re.compile(r"token(?!$)", re.IGNORECASE)  # max-num-batched-tokens, not hf-token
_NUMBER = re.compile(r"[+-]?\d{1,9}(\.\d+)?[kmgtKMGT]?")
_SECRET_VALUE = re.compile(r"(sk|hf|ghp|gho|glpat)[-_]\w{6,}")


def _is_secret(name: str, value: str) -> bool:
    """A name with key, token, secret or password in it; but a number of tokens may be shown."""
    if _SECRET_VALUE.match(value):
        return True
    if not _SECRET_NAME.search(name):
        return False
    counts = _COUNTS_TOKENS.search(name) and not re.search("key|secret|passw|credential", name, re.IGNORECASE)
    return not (counts and _NUMBER.fullmatch(value))


def redact_argv(words: Sequence[str], private: Collection[str] = ()) -> list[str]:
    """A command line without secrets: `--api-key X` and `--api-key=X` -> `***`; each word of `private` is hidden too.

    What follows a secret flag is hidden up to the next flag, as a flag may take several values.
    """
    result, flag = [], ""
    for word in words:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            hide = equals and (_is_secret(flag, value) or value in private)
            result.append(f"{flag}={HIDDEN}" if hide else HIDDEN if word in private else word)
        else:
            result.append(HIDDEN if word in private or _is_secret(flag, word) else word)
    return result


def redact_values(values: Mapping[str, str]) -> dict[str, str]:
    """Environment variables or settings by name, with the values of those that may be secret replaced."""
    return {name: HIDDEN if _is_secret(name, value) else value for name, value in values.items()}
