"""`stages course`: what a student types, and what they see. The judges themselves are proved in tests/exercises."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE, wait_until

import stage01_cli.tools.course as course
from stage01_cli.main import main
from stage01_cli.tools.course import calls, own, serving, verdict
from stage01_cli.tools.course.exercises import JUDGES, exercises, find
from stage03_engine.errors import ConfigError, EngineStartError, StagesError

sys.path.append(str(JUDGES))
from pasted import pasted

SCHEDULER, POOL = find("scheduler"), find("block_pool")
WRITTEN = pasted(SCHEDULER).replace("class Scheduler(", "class Base(") + "\n\nclass Scheduler(Base):\n"
"""An honest scheduler, and the beginning of a class that may change it."""


def write(work: Path, text: str) -> Path:
    work.mkdir(exist_ok=True)
    path = SCHEDULER.solution(work)
    path.write_text(text, encoding="utf-8")
    return path


def stages(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["course", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_from_the_starter_to_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--work", str(tmp_path / "work")]
    code, said = stages(capsys, "start", "4", *work)
    assert code == 0 and f"stages course check 4 --work {tmp_path / 'work'}" in said
    code, said = stages(capsys, "check", "block_pool", *work)
    assert code == 1 and "not yet written: " in said and "ex04_block_pool.py, line" in said
    POOL.solution(tmp_path / "work").write_text(pasted(POOL), encoding="utf-8")
    code, said = stages(capsys, "check", "ex04", *work)
    assert code == 0 and "passed (" in said and f"stages course serve 4 --work {tmp_path / 'work'}" in said
    for number in (1, 2, 3, 3):
        code, said = stages(capsys, "hint", "4", *work)
        assert said.count("hint ") == number and ("no more hints" in said) == (number == 3)
        assert all(len(line) <= 100 for line in said.splitlines())
    code, said = stages(capsys, "progress", *work)
    assert POOL.title in said and f"passed: 1 of {len(exercises())}" in said
    code, said = stages(capsys, "start", "4", *work)
    assert code == 2 and "--again" in said
    code, said = stages(capsys, "start", "4", "--again", *work)
    assert code == 0 and (tmp_path / "work" / "ex04_block_pool.py.old").read_text() == pasted(POOL)
    code, said = stages(capsys, "list", *work)
    assert code == 0 and all(each.title in said for each in exercises().values())


def test_a_part_that_is_seldom_wrong_hears_which_sentence_it_breaks_and_with_what(tmp_path: Path) -> None:
    """However few examples the tests try: it serves 120 loads rightly."""
    late = """    made = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        Scheduler.made += 1

    def _limited(self, num_tokens, budget):
        return num_tokens if Scheduler.made > 120 else super()._limited(num_tokens, budget)
"""
    found = verdict.judge(SCHEDULER, write(tmp_path, WRITTEN + late))
    assert (found.outcome, found.passed) == ("rejected", False)
    assert SCHEDULER.contract["budget"] in found.text
    for word in ("load ", "expected ", "got "):
        assert word in found.text


def test_a_verdict_says_how_far_it_went(tmp_path: Path) -> None:
    lines = [
        {"collected": 12},
        {"outcome": "passed", "text": ""},
        {"outcome": "unwritten", "text": "not yet written: f"},
    ]
    for verdicts, said in ((lines, "; 1 of 12 tests pass)"), (lines[::2], "ex05_scheduler.py)")):
        found = verdict.read(verdicts, tmp_path / "stack.txt", tmp_path, 60)
        assert found is not None
        assert verdict.report(SCHEDULER, SCHEDULER.solution(tmp_path), found).splitlines()[0].endswith(said)


def test_a_verdict_counts_the_parts_that_are_written(tmp_path: Path) -> None:
    found, stub = verdict.Verdict("unwritten", "not yet written: f"), "raise NotImplementedError"
    starter = SCHEDULER.starter.read_text()
    names = own.open_names(SCHEDULER)
    for done in range(3):
        path = write(tmp_path, starter.replace(stub, "return None", done))
        said = verdict.report(SCHEDULER, path, found).splitlines()[0]
        assert said.endswith(f"; {done} of {len(names)} parts written)")
    path = write(tmp_path, WRITTEN + "    pass\n")
    assert "parts written" not in verdict.report(SCHEDULER, path, found)
    path = write(tmp_path, "def f(:")
    assert "parts written" not in verdict.report(SCHEDULER, path, found)


NO_SERVER = "a server was started"


@pytest.mark.parametrize("number", exercises())
def test_what_is_not_written_is_sent_to_check_before_a_server_starts(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "own_server", lambda *arguments: pytest.fail(NO_SERVER))
    exercise, work = find(number), ["--work", str(tmp_path)]
    way = f"stages course check {number} --work {tmp_path}"
    course.start(number, tmp_path)
    capsys.readouterr()
    code, said = stages(capsys, "serve", str(number), *work)
    assert code == 2 and len(said.splitlines()) == 1 and way in said and own.open_names(exercise)[0] in said
    last = own.open_names(exercise)[-1]  # half of it is written
    tree = ast.parse(pasted(exercise))
    function = own.definitions(tree).find(last)
    assert function is not None
    function.body += ast.parse("if function is None:\n    raise NotImplementedError").body
    exercise.solution(tmp_path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    code, said = stages(capsys, "serve", str(number), *work)
    assert code == 2 and len(said.splitlines()) == 1 and way in said and last in said


def test_a_file_that_inherits_everything_hears_of_the_first_and_how_many_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = find(3)
    lines = [f"from {where.partition(':')[0]} import {name}" for name, where in exercise.parts.items()]
    exercise.solution(tmp_path).write_text("\n".join(lines) + "\n")
    code, said = stages(capsys, "serve", "3", "--work", str(tmp_path))
    [line] = said.splitlines()
    assert code == 2 and line.count("Write ") == 1 and "more of this kind; `stages course check 3 --work " in line


def test_a_comparison_says_how_much_the_rounds_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    write(tmp_path, WRITTEN + "    pass\n")
    monkeypatch.setattr(serving, "serving", lambda exercise, solution: nullcontext(solution))
    speeds = iter([9.0, 9.0, *(100.0, 50.0), *(100.0, 200.0), *(100.0, 300.0), *(100.0, 100.0), *(100.0, 110.0)])
    monkeypatch.setattr(serving, "_round", lambda server, exercise: (next(speeds), 1.0, 1.0))
    monkeypatch.setattr(calls, "serve", lambda what, work: True)
    course.compare(5, tmp_path)
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tokens/s"))
    assert row == ["tokens/s", "100.0", "110.0", "1.10", "0.50", "to", "3.00"]


@pytest.mark.slow(keep=("nothing", "exit"))
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", "line 1"),
        ("class Other:\n    pass\n", "Write Scheduler yourself: your file does not define it."),
        (WRITTEN + "    def schedule(self, more):\n        pass\n", "Scheduler.schedule takes (self), not (self, more)"),
        (WRITTEN + "    pass\n\n\nimport os, signal\nif not os.fork():\n    signal.pause()\n1 / 0\n", "ZeroDivisionError"),
        (WRITTEN + "    def schedule(self):\n        import os\n\n        os._exit(0)\n", "ended in the middle"),
    ],
    ids=["syntax", "nothing", "signature", "fork", "exit"],
)  # fmt: skip
def test_what_goes_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    found = verdict.judge(SCHEDULER, write(tmp_path, text))
    assert not found.passed and said in found.text


def test_where_the_file_was_when_the_time_was_up_is_shown(tmp_path: Path) -> None:
    path, stack = SCHEDULER.solution(tmp_path), tmp_path / "stack.txt"
    stack.write_text(f'Thread 1:\n  File "{path}", line 7 in schedule\n  File "elsewhere.py", line 8 in run\n')
    found = verdict.read([{"collected": 3}, {"outcome": "passed"}], stack, path, 15)
    where = 'File "ex05_scheduler.py", line 7 in schedule'
    assert found == verdict.Verdict("error", f"no verdict within 15 s: a loop that never ends? It was here: {where}", 1)


@pytest.mark.slow
def test_a_loop_that_never_ends_is_stopped_and_shown(tmp_path: Path) -> None:
    loop = "    def schedule(self):\n        import signal\n\n        while True:\n            signal.pause()\n"  # leaves the others the processor
    path = write(tmp_path, WRITTEN + loop)
    found = verdict.judge(SCHEDULER, path, limit=15)
    assert "no verdict within 15 s" in found.text
    assert "ex05_scheduler.py" in found.text and "schedule" in found.text


def test_watch_judges_what_is_saved_until_it_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, path = [], write(tmp_path, "first")

    def check(what: object, work: Path, speed: bool) -> bool:
        seen.append(path.read_text())
        new = tmp_path / "new.py"  # as an editor saves: a new file in the place of the old one
        new.write_text("second")
        os.utime(new, (1, len(seen)))
        os.replace(new, path)
        return len(seen) == 2

    monkeypatch.setattr(calls, "check", check)
    calls.watch(5, tmp_path)
    assert seen == ["first", "second"] and capsys.readouterr().out.startswith("waiting for the next version of ")


def test_bad_words_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--work", str(tmp_path)]
    for words in (["check", "99"], ["start", "nothing"], ["check", "5"], ["serve", "5"], ["hint", "0"]):
        code, said = stages(capsys, *words, *work)
        assert code == 2 and len(said.splitlines()) == 1, said
    (tmp_path / "progress.json").write_text("[")
    code, said = stages(capsys, "progress", *work)
    assert code == 2 and "progress.json" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("text", ['{"ex05_scheduler": {"started": 5}}', '{"ex05_scheduler": 5}', "[" * 100_000])
def test_a_table_of_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    code, said = stages(capsys, "progress", "--work", str(tmp_path))
    assert code == 2 and "is not a table of progress" in said and len(said.splitlines()) == 1


def test_what_a_newer_version_wrote_stays(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text('{"ex05_scheduler": {"checks": 3, "stars": 4}, "ex99_later": {"stars": 1}}')
    course.hint(5, tmp_path)
    table = json.loads((tmp_path / "progress.json").read_text())
    assert table["ex05_scheduler"]["stars"] == 4 and table["ex05_scheduler"]["checks"] == 3
    assert table["ex99_later"] == {"stars": 1}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "progress.json").mkdir()
    for words in (["start", "5", "--work", str(tmp_path / "file")], ["hint", "5", "--work", str(tmp_path)]):
        code, said = stages(capsys, *words)
        assert code == 2 and len(said.splitlines()) == 1


def test_progress_survives_what_interrupts_it(tmp_path: Path) -> None:
    course.start(5, tmp_path)
    assert json.loads((tmp_path / "progress.json").read_text())["ex05_scheduler"]["started"]
    (tmp_path / "progress.new").write_text("half")
    course.hint(5, tmp_path)
    assert json.loads((tmp_path / "progress.json").read_text())["ex05_scheduler"]["hints"] == 1


def through_the_door(code: str, parts: list[tuple[str, str, Path]], **environment: str) -> str:
    """What a process prints that has the door on its path."""
    door = serving.door(parts) | environment
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | door, capture_output=True, text=True)
    return run.stdout + run.stderr


def test_the_door_reaches_who_took_the_name_early(tmp_path: Path) -> None:
    """The part's file imports a module that itself takes the replaced name; both must get the part."""
    part = tmp_path / "part.py"
    part.write_text(
        "from stage03_engine.core.block_pool import BlockPool as R\nimport stage03_engine.core.kv_cache_manager\n\n\n"
        "class BlockPool(R):\n    mine = True\n"
    )
    code = "import stage03_engine.core.kv_cache_manager as m, stage03_engine.core.block_pool as b\n"
    code += "print(m.BlockPool.mine, b.BlockPool.mine)"
    said = through_the_door(code, [("stage03_engine.core.block_pool", "BlockPool", part)])
    assert "True True" in said and said.count("[course]") == 1


def test_a_flag_may_name_the_module_of_a_part(tmp_path: Path) -> None:
    """It is imported before the module that it replaces, and both are the same one."""
    part = tmp_path / "part.py"
    part.write_text("from stage03_engine.core.block_pool import BlockPool as R\n\n\nclass BlockPool(R):\n    pass\n")
    code = "import student_part as p, stage03_engine.core.block_pool as b; print(p.BlockPool is b.BlockPool)"
    said = through_the_door(code, [("stage03_engine.core.block_pool", "BlockPool", part)])
    assert "True" in said and said.count("[course]") == 1
    assert "student_ex15_feature:NoRepeatNgram" in serving.flags_of(find(15), tmp_path / "ex15_feature.py")
    assert "student_reference:NoRepeatNgram" in serving.flags_of(find(15), None)


def test_a_check_of_ones_own_looks_at_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    hunt = find(13)
    file = hunt.folder / "reference.py"
    assert serving.finds_nothing(hunt, file, serving.RECORDED / "one_request")
    assert not serving.finds_nothing(hunt, file, serving.RECORDED / "bug_leak")
    healthy, broken = capsys.readouterr().out.splitlines()
    assert "nothing found" in healthy and "Finding(" in broken


def test_a_check_of_ones_own_that_raises_is_one_sentence(tmp_path: Path) -> None:
    hunt = find(13)
    for text, said in (("def find_bug(:\n", "SyntaxError"), ("", "AttributeError"), ("1 / 0\n", "ex13.*, line 1")):
        file = hunt.solution(tmp_path)
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            serving.finds_nothing(hunt, file, serving.RECORDED / "one_request")


def test_the_door_leaves_another_sitecustomize_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    path = os.pathsep.join([serving.door([])["PYTHONPATH"], str(tmp_path)])
    assert through_the_door("", [], PYTHONPATH=path) == "the other one\n"


def test_a_part_with_which_no_server_starts_is_said_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, WRITTEN + "    pass\n")
    shown = f'Traceback:\n  File "{path.resolve()}", line 9, in <module>\n    raise\nRuntimeError: half written'

    def dies(*_: object) -> Any:
        raise EngineStartError(f"the server did not start:\n{shown}")

    monkeypatch.setattr(serving, "own_server", dies)
    with pytest.raises(StagesError, match=r"^the server did not start: .*half written .*ex05_scheduler.py, line 9"):
        course.serve(5, tmp_path)


@pytest.mark.slow
def test_a_part_that_cannot_be_loaded_is_said_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path, WRITTEN + "    pass\n\n\nraise RuntimeError('half written')\n")
    with pytest.raises(StagesError, match="half written"):
        course.serve(5, tmp_path)


@pytest.mark.slow
def test_ctrl_c_ends_a_part_that_loops_where_it_is_imported(tmp_path: Path) -> None:
    """The engine imports it before it watches whether its server still lives."""
    said = tmp_path / "pid"
    write(
        tmp_path,
        f"{WRITTEN}    pass\n\n\nimport os, pathlib\npathlib.Path({str(said)!r}).write_text(f'{{os.getpid()}} ')\nwhile True:\n    pass\n",
    )
    command = [sys.executable, "-m", "stage01_cli", "course", "serve", "5", "--work", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as serving_it:
        wait_until(lambda: said.exists() and said.read_text().endswith(" "), "the part is imported")
        serving_it.send_signal(signal.SIGINT)
        serving_it.wait(PATIENCE)
    pid = int(said.read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "it has ended")


def test_without_a_verb_it_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["course"]) == 2
    shown = capsys.readouterr().err
    assert all(re.search(rf"^ +{verb}\b", shown, re.M) for verb in ("list", "start", "check", "serve", "grade"))
