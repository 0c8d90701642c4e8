"""Which regular expressions are taken: what Python's `re` and xgrammar's dialect understand alike, for a match of the whole
text. (vLLM checks nothing here; what xgrammar does not know, it then takes for something else.)
"""

from __future__ import annotations

import re
import warnings

_ESCAPES = "dDwWsSntrfvxu0"  # of letters and digits; punctuation may be escaped freely
_NOT_IN_JSON = (
    "ntrfvxu0\\"  # the compiler writes these characters into a JSON string as they are; JSON wants them escaped
)
_REPETITION = re.compile(r"\{\d*,?\d*\}")


def _has_flags(pattern: str) -> bool:
    """Looked for before Python compiles the pattern: under (?i) it walks through every character of every set, which takes
    minutes for a long pattern. A comment is refused too, as a bracket in one could hide a flag from this."""
    escaped = in_set = False
    for position, character in enumerate(pattern):
        if escaped or character == "\\":
            escaped = not escaped
        elif in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
        elif character == "(" and re.match(r"\(\?[aiLmsux#-]", pattern[position : position + 3]):
            return True
    return False


def check_regex(pattern: str, in_json: bool = False) -> str | None:
    """What is wrong with the pattern, or None. `in_json`: it is for the inside of a JSON string."""
    if in_json and any(c == '"' or c < " " for c in pattern):
        return "holds a quote or a control character, which is not supported in JSON strings"
    if _has_flags(pattern):
        return "holds flags or a comment, (?i) or (?#...), which is not supported"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of nested sets: a future meaning that xgrammar does not share
            re.compile(pattern)
    except (re.error, OverflowError, ValueError, FutureWarning, DeprecationWarning) as error:
        return f"is not a valid regular expression: {error}"
    depth, in_set, position = 0, False, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
            escaped = pattern[position]
            if escaped.isalnum() and escaped not in _ESCAPES:
                return f"uses \\{escaped}, which is not supported"
            if in_json and escaped in _NOT_IN_JSON:
                return f"uses \\{escaped}, which is not supported in JSON strings"
        elif in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "^" and (depth or (position and pattern[position - 1] != "|")):
            return "may have ^ only where the whole text begins"
        elif character == "$" and (depth or pattern[position + 1 : position + 2] not in ("", "|")):
            return "may have $ only where the whole text ends"
        elif character == "{" and not _REPETITION.match(pattern, position):
            return "must write a brace that is no repetition as \\{"
        position += 1
    return None
