"""What structured output a request may ask for (vllm/sampling_params.py, StructuredOutputsParams).

The API process only makes checks that take one pass over a bounded text; the rest is checked where the grammar is compiled
(core/features/structured_output).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, NoReturn

import msgspec

from stage03_engine.errors import InvalidRequestError

MAX_GRAMMAR_CHARACTERS = 65_536
COMPACT = "compact "
"""Before a kind in `key`: JSON without white space that only fills."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The output matches exactly one of: a JSON schema, a regular expression (whole output, "." is any character), one of
    several texts, a grammar in GBNF notation with the rule `root`, any JSON object, text with tags in it (structural_tag.py). JSON may have white space between its parts,
    unless `disable_any_whitespace` here or in the server's settings forbids what only fills.

    `json` and `structural_tag` may be given as text or as a Python value and are kept as text. `source` is the request's field for it, which
    messages name. Raises InvalidRequestError.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    source: str = "structured_outputs"
    checked: bool = False  # set below, and sent along: the engine process need not check what the front end has checked

    def __post_init__(self) -> None:
        if self.checked:
            return
        given = [
            kind for kind in KINDS if getattr(self, kind) not in (None, False) or (kind, self.json) == ("json", False)
        ]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            self._refuse(f"give exactly one of {', '.join(KINDS)}, got {found}")
        try:
            self._check(given[0])
        except RecursionError:
            self._refuse("is nested too deeply")
        msgspec.structs.force_setattr(self, "checked", True)

    def _check(self, kind: str) -> None:
        self._check_length(getattr(self, kind))
        if kind in ("json", "structural_tag"):
            msgspec.structs.force_setattr(self, kind, self._json_text(getattr(self, kind)))
        text = self.key[1]
        self._check_length(text)
        if "\0" in text or not _is_unicode(text):
            self._refuse("must be Unicode text without NUL")
        if kind == "choice" and (not self.choice or not all(self.choice)):
            self._refuse("must be a list of at least one text, none of them empty")
        if kind == "grammar" and not any(
            line.partition("::=")[0].strip() == "root" for line in text.splitlines() if "::=" in line
        ):
            self._refuse("needs a rule `root ::= ...`")
        if kind == "structural_tag":
            parts = json.loads(text)
            if not isinstance(parts, dict) or not ("format" in parts or {"structures", "triggers"} <= parts.keys()):
                self._refuse("a structural tag needs format, or structures and triggers")
        if kind == "json" and not text.startswith("{") and text != "true":
            self._refuse(f"must be a JSON object or true, got {text[:60]}")

    def _check_length(self, value: Any) -> None:
        """Looks at no more of the value than it may have, so that nothing long is ever written as text."""
        if _is_longer(value, MAX_GRAMMAR_CHARACTERS):
            found = f", got {len(value)}" if isinstance(value, str) else ""
            self._refuse(f"must have at most {MAX_GRAMMAR_CHARACTERS} characters{found}")

    def _json_text(self, schema: Any) -> str:
        """The schema as compact text, with its properties in their order."""
        if isinstance(schema, str):
            try:
                schema = json.loads(
                    schema, parse_constant=lambda name: self._refuse(f"holds {name}, which is not JSON")
                )
            except json.JSONDecodeError as error:
                self._refuse(f"is not valid JSON: {error}")
        try:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            self._refuse(f"cannot be written as JSON: {error}")

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidRequestError(f"{self.source}: {problem}.", self.source)

    @property
    def key(self) -> tuple[str, str]:
        """(kind, text): equal for requests that can share a compiled grammar."""
        if self.choice is not None:
            return "choice", json.dumps(self.choice, ensure_ascii=False)
        compact = COMPACT * self.disable_any_whitespace
        if self.json is not None:
            return compact + "json", str(self.json)
        if self.structural_tag is not None:
            return compact + "structural_tag", str(self.structural_tag)
        for kind in ("regex", "grammar"):
            if (text := getattr(self, kind)) is not None:
                return kind, text
        return compact + "json_object", ""


def _is_longer(value: Any, most: int) -> bool:
    """True if the value as JSON surely has more characters: those of its texts, and one more per item."""
    waiting = [value]
    while waiting and most >= 0:
        item = waiting.pop()
        if isinstance(item, str):
            most -= len(item)
        elif isinstance(item, dict | list):
            most -= len(item)
            if most >= 0:
                waiting += [*item, *item.values()] if isinstance(item, dict) else item
    return most < 0


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StructuredOutputs:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "structured_outputs": {
            "scheduler": "stage03_engine.core.features.structured_output.scheduler_hook:GrammarSchedulerHook",
            "runner": "stage03_engine.core.features.structured_output.runner_hook:GrammarRunnerHook",
        }
    }
    structured_outputs: StructuredOutputsParams | None = None  # what every output must match
