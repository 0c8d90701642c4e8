"""The committed leaderboards of exercises 12 and 18 are what their policies score, and the scripts that a reader runs enter theirs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from judging import load

from stage01_cli.tools.course.exercises import find
from stage01_cli.tools.course.grading import environment

FOLDER = find(12).folder
score = load(FOLDER / "score.py")


def test_the_leaderboard_is_what_the_policies_score() -> None:
    committed = json.loads((FOLDER / "leaderboard.json").read_text(encoding="utf-8"))
    assert committed == score.house_board()
    assert "\n".join(score.table(committed)) in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", ["", "autumn", "2026"])
def test_a_class_can_have_a_load_of_its_own(seed: str) -> None:
    """It differs from load.json and from that of every other class, and a right policy passes on it."""
    load_of, given = score.load_of(seed), score.read_load()
    assert load_of == score.load_of(seed) != score.load_of(f"{seed}+")
    assert not {job.client for job in load_of.jobs} & {job.client for job in given.jobs}
    assert not {job.name for job in load_of.jobs} & {job.name for job in given.jobs}
    policy = load(FOLDER / "reference.py").Scheduler
    own, fcfs = score.score(score.serve(policy, load_of)), score.score(score.house()["fcfs"](load_of))
    assert len(fcfs.better(own)) <= 1 and own.better(fcfs, by=0.05)


def test_a_class_s_seed_reaches_the_judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COURSE_SEED", "autumn")
    assert environment(tmp_path)["COURSE_SEED"] == "autumn"


def test_a_policy_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / "work" / "leaderboard.json"
    words = ["score.py", str(FOLDER / "reference.py"), "--name", "mine", "--board", str(board)]
    monkeypatch.setattr(sys, "argv", words)
    assert score.main() == 0
    clients, policies = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in clients.splitlines()] == ["client", "agent", "batch", "chat"]
    assert [line.split()[0] for line in policies.splitlines()][:2] == ["policy", "mine"]
    assert list(json.loads(board.read_text(encoding="utf-8"))) == ["mine"]


def test_a_file_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["score.py", str(tmp_path / "no.py")])
    with pytest.raises(SystemExit):
        score.main()
    assert "stages course start 12" in capsys.readouterr().err


ROUTING = find(18).folder
routing = load(ROUTING / "score.py")


def test_the_leaderboard_of_routers_is_what_they_score() -> None:
    committed = json.loads((ROUTING / "leaderboard.json").read_text(encoding="utf-8"))
    assert committed == routing.house_board()
    assert "\n".join(routing.table(committed)) in (ROUTING / "README.md").read_text(encoding="utf-8")


def test_a_router_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / "work" / "leaderboard.json"
    file = ROUTING / "mutants" / "longest_prefix.py"
    monkeypatch.setattr(sys, "argv", ["score.py", str(file), "--name", "mine", "--board", str(board)])
    assert routing.main() == 0
    lines = capsys.readouterr().out.splitlines()
    [mine, theirs] = [line.split() for line in lines if line.startswith(("mine", "longest prefix"))]
    assert sorted(mine[-9:]) == sorted(theirs[-9:]) and list(json.loads(board.read_text(encoding="utf-8"))) == ["mine"]


@pytest.mark.parametrize("seed", ["", "autumn", "2026"])
@pytest.mark.parametrize("load_of", routing.LOADS.values(), ids=routing.LOADS)
def test_a_class_can_have_routers_loads_of_its_own(load_of: Callable[..., object], seed: str) -> None:
    assert load_of(seed) == load_of(seed) != load_of(f"{seed}+")
