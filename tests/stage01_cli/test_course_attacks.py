"""Ways to be given points by one's judge instead of by one's work, each really tried: by a grader who reads the file first, and, for those
that would do most, by one who does not."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from stage01_cli.tools.course import grading, sandbox, verdict
from stage01_cli.tools.course.exercises import JUDGES, exercises, find
from stage01_cli.tools.course.guard import Untouched
from stage01_cli.tools.course.reading import refusals
from stage03_engine.frontend.tokenizer import Tokenizer

sys.path.append(str(JUDGES))
from borrowed import hidden
from pasted import pasted

STREAM = find("stream")
WRONG = STREAM.starter.read_text(encoding="utf-8").replace("raise NotImplementedError", "return None")
"""It is written, and wrong everywhere."""
ATTACKS = {
    "imports by name": "_r = __import__('stage03_engine.frontend.detokenizer')\n",
    "imports by a dictionary": "_r = __builtins__['__import__']('os')\n",
    "imports by importlib": "import importlib\n_r = importlib.import_module('os')\n",
    "looks modules up": "import sys\n_m = sys.modules['judging']\n",
    "looks modules up elsewhere": "import dataclasses\n_m = dataclasses.sys.modules\n",
    "takes a module from another": "from dataclasses import sys as _s\n",
    "runs text": "exec('import os')\n",
    "evaluates text": "_e = eval('1')\n",
    "compiles text": "_c = compile('1', '', 'eval')\n",
    "has text evaluated": "import typing\n\n\nclass C:\n    x: \"eval('1')\"\n\n\ntyping.get_type_hints(C)\n",
    "reads the reference's text": "_t = open('stage03_engine/frontend/detokenizer.py').read()\n",
    "getattr of a made name": "_x = getattr(find_stop, '__glo' + 'bals__')\n",
    "getattr of a name": "_x = getattr(find_stop, '__globals__')\n",
    "getattr by another name": "_g = getattr\n_x = _g(find_stop, '__globals__')\n",
    "attrgetter": "import operator\n_x = operator.attrgetter('__globals__')(find_stop)\n",
    "a pattern": "match find_stop:\n    case object(__globals__=_g):\n        pass\n",
    "walks classes": "_s = ().__class__.__base__.__subclasses__()\n",
    "walks frames": "def _f():\n    yield\n\n\n_b = _f().gi_frame.f_back\n",
    "walks the garbage": "import gc\n_o = gc.get_objects()\n",
    "inspects": "import inspect\n_f = inspect.stack()\n",
    "ctypes": "import ctypes\n",
    "patches pytest": "import pytest\npytest.fail = print\n",
    "patches hypothesis": "import hypothesis\nhypothesis.given = print\n",
    "patches the judge": "from judging import Judge\nJudge.rejects = print\n",
    "patches what it imports": "import math\nmath.isclose = print\n",
    "patches a class that it was given": "SamplingParams.stop = ''\n",
    "patches by the type of an object": "def _f(x):\n    type(x).stop = ''\n",
    "patches by another name": "import math\n_m = math\n_m.isclose = print\n",
    "setattr": "setattr(SamplingParams, 'stop', '')\n",
    "ends the process": "import os\nos._exit(0)\n",
    "waits for the end": "import atexit\natexit.register(print)\n",
    "is equal to all": "class Yes(int):\n    def __eq__(self, other):\n        return True\n",
    "is equal to all, by a value": "class Yes(int):\n    __eq__ = lambda self, other: True\n",
    "is equal to all, by a made class": "_y = type('Yes', (int,), {'_' + '_eq_' + '_': print})\n",
    "starts a thread": "import threading\nthreading.Thread(target=print).start()\n",
    "writes where its verdict goes": "import os\nfor _n in range(3, 64):\n    os.write(_n, b'passed')\n",
    "leaves a verdict": "open('verdicts.jsonl', 'w').write('passed')\n",
    "asks another exercise": "from notebooks.exercises.ex12_policy.reference import Scheduler\n",
    "takes all": "from math import *\n",
    "unpickles": "import pickle\n",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing_and_is_named_in_a_sentence(attack: str, tmp_path: Path) -> None:
    path = STREAM.solution(tmp_path)
    path.write_text(WRONG + "\n\n" + ATTACKS[attack], encoding="utf-8")
    grade = grading.grade_one("student", STREAM, path)
    first = len(WRONG.splitlines()) + 3
    lines = range(first, first + len(ATTACKS[attack].splitlines()))
    assert (grade.points, grade.outcome) in ((0, "refused"), (0, "rejected"))
    assert any(f"ine {line}" in grade.verdict for line in lines), grade.verdict


@pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)
def test_the_honest_are_not_refused(exercise, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = exercise.solution(tmp_path)
    path.write_text(pasted(exercise), encoding="utf-8")
    assert refusals(exercise, path) == refusals(exercise, exercise.starter) == []
    for mutant in (exercise.folder / "mutants").glob("*.py"):
        ast.parse(mutant.read_text(encoding="utf-8"))
    path.write_text(hidden(exercise), encoding="utf-8")
    assert refusals(exercise, path)


UNREAD = {
    "ends the process": "import os\nos._exit(0)\n",
    "ends pytest": "import pytest\npytest.exit('passed', 0)\n",
    "writes where its verdict goes": "import os\nfor _n in range(3, 64):\n    try:\n        os.write(_n, b'{\"collected\": 0}\\n')\n"
    "    except OSError:\n        pass\nos._exit(0)\n",
    "leaves a verdict": "open('verdicts.jsonl', 'w').write('{\"collected\": 0}')\n",
    "asks the reference": "",
}


@pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
@pytest.mark.slow
@pytest.mark.parametrize("attack", UNREAD)
def test_an_attack_that_nobody_has_read_earns_nothing(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "refusals", lambda exercise, path: [])
    path = STREAM.solution(tmp_path)
    path.write_text((WRONG if UNREAD[attack] else hidden(STREAM)) + "\n\n" + UNREAD[attack], encoding="utf-8")
    grade = grading.grade_one("student", STREAM, path)
    assert grade.points == 0 and grade.outcome in ("error", "rejected"), grade


def test_what_others_wrote_is_seen_to_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Untouched()
    assert before.changed() is None
    monkeypatch.setattr(Tokenizer, "decode", lambda *arguments: "")
    assert "decode of stage03_engine.frontend.tokenizer.Tokenizer" in str(before.changed())


@pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
@pytest.mark.slow
def test_who_changes_what_the_judge_uses_is_told_so(tmp_path: Path) -> None:
    """By a way that no reader sees: the class goes through a parameter."""
    path = STREAM.solution(tmp_path)
    attack = "def _f(kind):\n    kind.decode = lambda *arguments: ''\n\n\n_f(Tokenizer)\n"
    path.write_text(f"{pasted(STREAM)}\n\n{attack}", encoding="utf-8")
    assert refusals(STREAM, path) == []
    grade = grading.grade_one("student", STREAM, path)
    assert grade.points == 0 and "decode of stage03_engine.frontend.tokenizer.Tokenizer" in grade.verdict, grade


def test_whoever_checks_is_told_what_a_grader_would_say(tmp_path: Path) -> None:
    path = STREAM.solution(tmp_path)
    path.write_text(pasted(STREAM) + "\n\nimport os\n", encoding="utf-8")
    said = verdict.report(STREAM, path, verdict.Verdict("passed", "", 12, 12))
    assert "passed" in said and "Whoever grades it would not run it, though: Line " in said
