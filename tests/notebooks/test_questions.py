"""The bank of questions: as many of each kind as it promises, answers whose numbers are right, and proofs that exist."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from stagetrace import VOCABULARY

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
import alarms  # noqa: E402
import map_lines  # noqa: E402
import questions  # noqa: E402

QUESTIONS = questions.read()
EACH = pytest.mark.parametrize("question", QUESTIONS, ids=[str(number) for number in range(1, len(QUESTIONS) + 1)])
KNOWN = {
    "ceil": math.ceil,
    "inf": math.inf,
    "min": min,
    "quantile": alarms.quantile,
    "range": range,
    "round": round,
    "sum": sum,
    "int": int,
}


def value(expression: str) -> float:
    """What a small expression is worth: numbers, and the functions above."""
    names = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
    assert names <= {*KNOWN, "i"}, names
    return float(eval(expression, {"__builtins__": {}}, KNOWN))


def test_there_are_two_of_each_kind_for_each_of_ten_weeks() -> None:
    counted = Counter((question.week, question.kind) for question in QUESTIONS)
    assert len(QUESTIONS) == 60 and len(questions.WEEKS) == 10
    assert counted == {(week, kind): 2 for week in range(1, 11) for kind in questions.KINDS}
    assert len({question.ask for question in QUESTIONS}) == 60
    assert [question.week for question in QUESTIONS] == sorted(question.week for question in QUESTIONS)


@EACH
def test_an_answers_numbers_are_right(question: questions.Question) -> None:
    said = question.answer.replace("-", " ")
    for expression, number in question.compute:
        assert value(expression) == pytest.approx(float(number.replace(",", "")), rel=1e-9), expression
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", said), f"{number} is not in the answer"
    assert question.compute or question.kind != "apply", "what is to be computed is computed here too"


@EACH
def test_its_proofs_exist(question: questions.Question) -> None:
    assert question.proof
    for proof in question.proof:
        path, _, name = proof.partition("::")
        assert (ROOT / path).is_file(), path
        assert not name or name in map_lines.definitions(ROOT / path), proof
    assert not [event for event in question.events if event not in VOCABULARY]


@EACH
def test_a_debugging_question_names_no_event_that_nobody_emits(question: questions.Question) -> None:
    """In excerpts and in prose: a word with a dot in it that begins as an event does is one."""
    families = {name.partition(".")[0] for name in VOCABULARY}
    words = re.findall(r"(?<![\w/.`-])`?([a-z_]+\.[a-z_]+)`?(?![\w/])", question.ask + " " + question.answer)
    assert not [word for word in words if word.partition(".")[0] in families and word not in VOCABULARY]


def test_the_page_is_made_from_its_source() -> None:
    page = questions.PAGE.read_text(encoding="utf-8")
    assert page == questions.page(), "run: make notebooks-build ARGS=MAP"
    assert page.count("<details>") == page.count("</details>") == 60
    broken = [t for t in re.findall(r"\]\(([^)#]+)", page) if not (questions.FOLDER / t).exists()]
    assert not broken


def test_a_wrong_number_is_noticed() -> None:
    wrong = questions.Question(1, "apply", "?", "It is 5.", [], [], [["2 + 2", "5"]])
    with pytest.raises(AssertionError, match=r"2 \+ 2"):
        test_an_answers_numbers_are_right(wrong)
    hidden = questions.Question(1, "apply", "?", "It is 14.", [], [], [["2 + 2", "4"]])
    with pytest.raises(AssertionError, match="not in the answer"):
        test_an_answers_numbers_are_right(hidden)
