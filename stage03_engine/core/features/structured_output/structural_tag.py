"""Structural tags as a Lark grammar: text that is free until a trigger comes, then one of the tags that begin with it (xgrammar's
structural_tag; vllm/v1/structured_output/backend_guidance.py, serialize_guidance_grammar).

Free text and what ends it are one lexeme, a lazy one: it ends where its trigger, or the end of the tag around it, stands for the first
time. So what ends free text cannot be part of it, and a trigger cannot be passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 16  # formats in formats
FORMATS = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags and tags_with_separator"


def structural_tag_to_lark(value: Any, schema: Callable[[Any], str], regex: Callable[[str], str]) -> str:
    """The rules from `start` on. `value` is the request's JSON; `schema` and `regex` write what they are given for Lark.
    Raises ValueError with what is wrong."""
    rules = _Rules(schema, regex)
    body = rules.expression(_format(value), [""])
    return "\n".join([f"start: {body}", *rules.lines]) + "\n"


def _format(value: Any) -> Any:
    """The format, also of the older form with `structures` and `triggers`."""
    value = _object(value, "structural_tag")
    if "format" in value:
        return value["format"]
    if "structures" not in value or "triggers" not in value:
        raise ValueError("needs format, or structures and triggers")
    tags = []
    for each in _list(value, "structures"):
        content = {"type": "json_schema", "json_schema": _object(each, "structures").get("schema")}
        tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end", "")})
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


class _Rules:
    """`lines` grow with each lexeme of free text, which needs a rule of its own."""

    def __init__(self, schema: Callable[[Any], str], regex: Callable[[str], str]) -> None:
        self.lines = [r"TEXT: /(.|\n)*/"]
        self._schema, self._regex = schema, regex

    def expression(self, node: Any, ends: list[str], depth: int = 0) -> str:
        """What matches the format and then one of `ends`; an empty one is nothing."""
        kind = _object(node, "format").get("type", "tag" if "begin" in node else None)
        if depth > MAX_DEPTH:
            raise ValueError(f"has formats in formats, more than {MAX_DEPTH} deep")
        if kind == "const_string":
            return f"{_quoted(_text(node, 'value'))} {_one_of(ends)}"
        if kind == "json_schema":
            given = node.get("json_schema")
            return f"%json {self._schema(True if given is None else given)} {_one_of(ends)}"
        if kind == "regex":
            return f"/{self._regex(_text(node, 'pattern'))}/s {_one_of(ends)}"
        if kind == "any_text":
            self._refuse_excludes(node)
            return self._free(ends)
        if kind == "sequence":
            return self._sequence(_list(node, "elements"), ends, depth)
        if kind == "or":
            return _any([self.expression(each, ends, depth + 1) for each in _list(node, "elements")])
        if kind == "tag":
            return f"{self._tag(node, depth)} {_one_of(ends)}"
        if kind == "triggered_tags":
            return self._triggered(node, ends, depth)
        if kind == "tags_with_separator":
            return self._separated(node, ends, depth)
        raise ValueError(f"knows no format {str(kind)[:60]!r}; there are {FORMATS}")

    def _sequence(self, elements: list[Any], ends: list[str], depth: int) -> str:
        if any(_object(each, "elements").get("type") in ("any_text", "triggered_tags") for each in elements[:-1]):
            raise ValueError("has free text before other elements of a sequence: put it into a tag, whose end ends it")
        before = [self.expression(each, [""], depth + 1) for each in elements[:-1]]
        return " ".join([*before, self.expression(elements[-1], ends, depth + 1)])

    def _tag(self, tag: Any, depth: int, begun: str = "") -> str:
        """A tag, of which `begun` is there already."""
        begin = _text(_object(tag, "tags"), "begin").removeprefix(begun)
        end = tag.get("end", "")
        ends = end if isinstance(end, list) and end else [end]
        if not all(isinstance(each, str) for each in ends):
            raise ValueError("needs a text as end of each tag, or a list of texts")
        return f"{_quoted(begin)} {self.expression(tag.get('content'), ends, depth + 1)}"

    def _triggered(self, node: Any, ends: list[str], depth: int) -> str:
        self._refuse_excludes(node)
        triggers, tags = _list(node, "triggers"), _list(node, "tags")
        if not all(isinstance(each, str) and each for each in triggers):
            raise ValueError("needs triggers that are texts, and none of them empty")
        by_trigger: dict[str, list[Any]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            begin = _text(_object(tag, "tags"), "begin")
            found = [trigger for trigger in by_trigger if begin.startswith(trigger)]
            if len(found) != 1:
                raise ValueError(
                    f"has {len(found)} triggers for the tag that begins with {begin[:60]!r}, and needs one"
                )
            by_trigger[found[0]].append(tag)
        if lost := [trigger for trigger, those in by_trigger.items() if not those]:
            raise ValueError(f"has no tag that begins with the trigger {lost[0][:60]!r}")
        groups = [
            f"{self._free([trigger])} {_any([self._tag(tag, depth + 1, trigger) for tag in those])}"
            for trigger, those in by_trigger.items()
        ]
        group = _any(groups)
        if node.get("stop_after_first"):
            first = f"{group} {_one_of(ends)}"
            return first if node.get("at_least_one") else _any([first, self._free(ends)])
        return f"{group}{'+' if node.get('at_least_one') else '*'} {self._free(ends)}"

    def _separated(self, node: Any, ends: list[str], depth: int) -> str:
        tag = _any([self._tag(each, depth + 1) for each in _list(node, "tags")])
        more = "" if node.get("stop_after_first") else f" ({_quoted(_text(node, 'separator', empty=True))} {tag})*"
        all_of_them = f"({tag}{more})"
        return f"{all_of_them}{'' if node.get('at_least_one') else '?'} {_one_of(ends)}"

    def _free(self, ends: list[str]) -> str:
        """Free text and the first of `ends` that comes."""
        if "" in ends:
            if ends != [""]:
                raise ValueError("has free text in a tag without an end: nothing would end it")
            return "TEXT"
        name = f"text_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: TEXT {_one_of(ends)}")
        return name

    @staticmethod
    def _refuse_excludes(node: Any) -> None:
        if node.get("excludes"):
            raise ValueError("excludes is not supported: only what ends a text can be kept out of it")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _one_of(texts: list[str]) -> str:
    return _quoted(texts[0]) if len(texts) == 1 else _any([_quoted(text) for text in texts])


def _any(choices: list[str]) -> str:
    return f"({' | '.join(choices)})"


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"needs an object in {name}")
    return value


def _list(node: dict[str, Any], name: str) -> list[Any]:
    value = node.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"needs {name}, a list that is not empty")
    return value


def _text(node: dict[str, Any], name: str, empty: bool = False) -> str:
    value = node.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"needs {name}, a text")
    return value
