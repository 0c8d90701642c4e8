"""What a request asks for, written as a Lark grammar, the language of llguidance (vllm/v1/structured_output/backend_guidance.py,
serialize_guidance_grammar).
"""

from __future__ import annotations

import json
import re
from typing import Any

from stage03_engine.core.features.structured_output.structural_tag import structural_tag_to_lark
from stage03_engine.params.structured_outputs import COMPACT

MAX_WHITESPACE = 16  # in a row, between two parts of a JSON text: a small model might otherwise never get further

# Any way to split a text into tokens is allowed. Forcing the usual one would tokenize the rest of a long literal at each step.
_HEADER = '%llguidance {"no_forcing": true}\n'
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def to_lark(kind: str, text: str, any_whitespace: bool = True) -> str:
    """The grammar for `StructuredOutputsParams.key`. Raises ValueError with what is wrong; much is found by the compiler only."""
    any_whitespace, kind = any_whitespace and not kind.startswith(COMPACT), kind.removeprefix(COMPACT)
    if kind == "json":
        return _HEADER + "start: %json " + _json_schema(json.loads(text), any_whitespace)
    if kind == "json_object":
        return _HEADER + "start: %json " + _json_schema({"type": "object"}, any_whitespace)
    if kind == "regex":
        return _HEADER + f"start: /{_regex(text)}/s"
    if kind == "choice":  # a terminal, so that the lexer distinguishes the choices
        choices = " | ".join(
            json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in json.loads(text)
        )
        return _HEADER + f"start: CHOICE\nCHOICE: {choices}"
    if kind == "structural_tag":
        return _HEADER + structural_tag_to_lark(
            json.loads(text), lambda schema: _json_schema(schema, any_whitespace), _regex
        )
    return _HEADER + _gbnf(text)


def _json_schema(schema: Any, any_whitespace: bool) -> str:
    """The schema as JSON, with llguidance's options in it; such options of the client's own are overwritten."""
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object or true")
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": any_whitespace}
    if any_whitespace:
        options["whitespace_pattern"] = f"[ \\t\\r\\n]{{1,{MAX_WHITESPACE}}}"
    else:
        options |= {"item_separator": ", ", "key_separator": ": "}
    if _narrow(schema):  # "\u0061" spells "a": such a key would get past the schema of "a"
        options["json_allowed_escapes"] = '"\\bfnrt'
    return json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)


def _narrow(schema: Any) -> bool:
    """Narrow a schema to what its author most likely means: an object has no properties but those that are named, unless
    it says otherwise, and a pattern is for the whole text. Returns True if some object has both named and other properties."""
    if not isinstance(schema, dict):
        return False
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = f"^(?:{_rust_regex(pattern)})$"
    parts = [part for name in _SINGLE if isinstance(part := schema.get(name), dict)]
    for name in _LISTS:
        parts += value if isinstance(value := schema.get(name), list) else []
    for name in _MAPS:
        parts += value.values() if isinstance(value := schema.get(name), dict) else []
    is_open = [_narrow(part) for part in parts]
    if "properties" in schema or "patternProperties" in schema:
        is_open.append(schema.setdefault("additionalProperties", False) is not False)
    return any(is_open) or "allOf" in schema


def _regex(pattern: str) -> str:
    """The pattern for between the slashes of /.../s: the whole text must match, "." is any character, \\d, \\w and \\s are ASCII."""
    from llguidance._lib import regex_to_lark

    return regex_to_lark(_rust_regex(pattern), "dws")


def _rust_regex(pattern: str) -> str:
    """The pattern in the dialect of Rust's `regex` crate. Syntax that means something else in Python is rewritten or refused."""
    # A set that is never closed is taken as one too: looking for the end of each of many would take quadratic time.
    parts = re.split(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{,(?=\d+\}))", pattern, flags=re.DOTALL)
    for position in range(1, len(parts), 2):
        part = parts[position]
        if part == "{,":
            parts[position] = "{0,"
        elif part[0] == "[" and re.search(r"\[|&&|--|~~", re.sub(r"\\.", "", part[1:], flags=re.DOTALL)):
            raise ValueError("is not a valid regular expression: write [, &&, -- and ~~ in a set with a backslash")
    if parts[-1].endswith("\\"):
        raise ValueError("is not a valid regular expression: it ends with a backslash")
    return "".join(parts)


def _gbnf(text: str) -> str:
    from llguidance import gbnf_to_lark

    # "a"{2}{3} is not Lark, ("a"{2}){3} is.
    gbnf_to_lark.RepetitionNode.is_atomic = lambda self: False  # type: ignore[method-assign]
    text = re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", _escape, text)
    try:
        return gbnf_to_lark.gbnf_to_lark(text).removeprefix("%llguidance {}\n")
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"cannot be used as a grammar: {error}") from error


def _escape(found: re.Match[str]) -> str:
    """An escape of GBNF as the converter takes it: it confuses \\u00e9, and does not know \\- and similar ones."""
    if (code := found[1] or found[2]) is None:
        plain = found[3].isalnum() or found[3] in '"\\[]'
        return found[0] if plain else f"\\x{ord(found[3]):02x}" if found[3].isascii() else found[3]
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"cannot be used as a grammar: \\u{code} is no character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
