"""Every exercise's part, loaded through the student's door from a file of its own, serves streaming HTTP, and its trace is the
reference's. Exercises with the same flags and the same request share a server: all of their parts are in it at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from judging import reference

from stage01_cli.tools.course import serving
from stage01_cli.tools.course.exercises import Exercise, exercises
from stage01_cli.tools.own_server import own_server
from stagetrace.check.difference import compare

PASSED_ON = "from {module} import {name} as _reference\n\n\nclass {name}(_reference):\n    pass\n"
TAKEN = "from {module} import {name}\n"


def solution(exercise: Exercise, folder: Path) -> Path:
    """A file with the reference's parts: classes as subclasses, which are other objects than the reference's own."""
    path = exercise.solution(folder)
    open_ended = exercise.folder / "reference.py"
    module, text = reference(exercise), open_ended.read_text(encoding="utf-8") if open_ended.is_file() else ""
    for name, where in exercise.parts.items():
        if not where:
            continue
        form = PASSED_ON if isinstance(getattr(module, name), type) else TAKEN
        text += form.format(module=where.partition(":")[0], name=where.partition(":")[2])
    path.write_text(text, encoding="utf-8")
    return path


def groups() -> list[list[Exercise]]:
    """Exercises that can share a server."""
    alike: dict[str, list[Exercise]] = defaultdict(list)
    for exercise in exercises().values():
        alike[repr((replace(exercise.serve, after=""), exercise.serve.prepare and exercise.name))].append(exercise)
    return list(alike.values())


@pytest.mark.parametrize("group", groups(), ids=lambda group: "-".join(each.name[:4] for each in group))
def test_the_parts_serve_and_decide_as_the_reference(group: list[Exercise], tmp_path: Path) -> None:
    first, own, right = group[0], tmp_path / "own", tmp_path / "right"
    parts = [part for each in group for part in serving.parts_of(each, solution(each, tmp_path))]
    flags = serving.flags_of(first, first.solution(tmp_path))
    with own_server("gpt2-tiny", [*flags, "--trace", str(own)], serving.door(parts)) as server:
        text = "".join(server.complete(serving.request(first), "r0"))
    said = "\n".join(server.log)
    for module, name, file in parts:
        assert f"{serving.MARK} {module}.{name} is now the one in {file}" in said
    if first.serve.recorded:
        right = serving.RECORDED / first.serve.recorded
    else:
        expected, _ = serving.record(first, None, right)
        assert text == expected
    result = compare(str(right), str(own))
    assert result.same, "\n".join(serving.differences(result, own))
    assert all(serving.finds_nothing(each, solution(each, tmp_path), own) for each in group)
