"""The leaderboard of exercise 16: what is sent, who is right, who is out, and one round behind the real server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import stage01_cli.tools.course as course
from stage01_cli.tools.course import ranking
from stage01_cli.tools.course.exercises import find
from stage03_engine.errors import ConfigError

REFERENCE = find(16).own_reference.read_text(encoding="utf-8")


def submitted(folder: Path, **students: str) -> Path:
    for student, text in students.items():
        (folder / student).mkdir()
        (folder / student / "ex16_engine.py").write_text(text, encoding="utf-8")
    return folder


def test_a_seed_makes_the_load() -> None:
    load = ranking.Load(7)
    assert load.requests() == ranking.Load(7).requests() != ranking.Load(8).requests()
    assert not {sample.prompt for _, sample in load.requests(1)} & {sample.prompt for _, sample in load.requests(2)}
    times = [at for at, _ in load.requests()]
    assert len(times) == load.num_requests and times == sorted(times) and times[0] == 0.0
    prompts = [sample.prompt for _, sample in load.requests()]
    assert any(one[:200] == other[:200] for one in prompts for other in prompts if one is not other)


def test_what_is_right() -> None:
    right = ranking.Right("abcd", [0, 2], [5.0, 0.0])
    assert right.is_kept_by("abcd")
    assert right.is_kept_by("abce")  # the second token was as likely as another
    assert not right.is_kept_by("axcd")
    assert not right.is_kept_by("")


def test_who_is_out_before_it_runs(tmp_path: Path) -> None:
    folder = submitted(tmp_path, ann=REFERENCE, bob="import os\n" + REFERENCE, eve="x = 1\n")
    found = {each.name: each.out for each in ranking.entrants(folder, None)}
    assert list(found) == [ranking.PROJECT, ranking.REFERENCE, "ann", "bob", "eve"]
    assert not found["ann"] and "Line 1: it imports os" in found["bob"] and "Write Engine yourself" in found["eve"]


def test_the_best_stands_first_and_who_is_out_last() -> None:
    first, second = ranking.Entrant("a", None, "", [2.0, 2.0], [9.0], [1.0]), ranking.Entrant("b", None, "", [3.0, 4.0])
    second = dataclasses.replace(second, ttft=[9.0], tpot=[1.0])
    lines = ranking.table([first, second, ranking.Entrant("c", None, "wrong")])
    assert [line.split()[:2] for line in lines[1:]] == [["1", "b"], ["2", "a"], ["-", "c"]]
    assert "1.75" in lines[1]


@pytest.mark.parametrize(
    "settings", [{"rounds": 0}, {"requests": 0}, {"rate": 0.0}, {"ttft": -1.0}, {"tpot": float("nan")}], ids=str
)
def test_settings_that_cannot_be_are_told_in_one_line(settings: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(settings))} must be") as error:
        course.leaderboard(work=tmp_path, **settings)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_without_engines_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="must hold files such as STUDENT/ex16_engine.py"):
        course.leaderboard(tmp_path / name, tmp_path)


@pytest.mark.long
def test_a_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submitted(tmp_path, ann=REFERENCE, bob=REFERENCE.replace("triu(start + 1)", "triu(start + 2)"))
    course.leaderboard(folder, rounds=1, seed=5, requests=3, rate=50.0, ttft=1e6, tpot=1e6)
    said = capsys.readouterr().out
    board = said.partition("ratio  ")[2].splitlines()[1:]
    assert {line[4:28].strip() for line in board[:3]} == {ranking.PROJECT, ranking.REFERENCE, "ann"}
    assert "bob" in board[3] and "right characters it says" in board[3]
    assert "--seed 5" in said
