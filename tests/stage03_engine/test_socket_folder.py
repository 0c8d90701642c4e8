"""The folders of sockets: private, and cleared away after servers that could not do it themselves, and after nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage03_engine.args.processes import SocketFolder
from stage03_engine.frontend.features.dead_folders.dead_folders import LOCKED, LockedFolder, remove_dead_folders

OWNER = """
import socket, tempfile
from stage03_engine.frontend.features.dead_folders.dead_folders import LockedFolder
folder = LockedFolder()
socket.socket(socket.AF_UNIX).bind(str(folder.path / "input"))
(folder.path / "rendezvous").touch()  # of workers
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own, whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_what_killed_servers_left_is_removed_and_nothing_else(base: Path) -> None:
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True) for _ in range(2)]
    folders = [Path(owner.stdout.readline().strip()) for owner in owners]  # type: ignore[union-attr]
    owners[0].kill()
    owners[0].communicate()
    mine = LockedFolder()
    try:
        remove_dead_folders()
        assert not folders[0].exists() and folders[1].joinpath("input").exists() and mine.path.exists()
    finally:
        owners[1].communicate("\n")
    remove_dead_folders()
    assert sorted(base.iterdir()) == [mine.path]
    mine.remove()
    mine.remove()
    assert not list(base.iterdir())


def test_a_living_server_that_locks_nothing_keeps_its_folder(base: Path) -> None:
    """One without this feature, whose room was deleted."""
    folder = SocketFolder()
    socket.socket(socket.AF_UNIX).bind(str(folder.path / "input"))
    remove_dead_folders()
    assert folder.path.joinpath("input").exists()


def test_a_folder_of_somebody_else_stays(base: Path) -> None:
    (base / f"{LOCKED}mynotes_").mkdir(mode=0o700)
    (base / f"{LOCKED}mynotes_" / "precious.txt").write_text("data")
    (base / f"{LOCKED}openfold").mkdir(mode=0o755)
    (base / f"{LOCKED}a.longer.name").mkdir(mode=0o700)
    (base / f"{LOCKED}file1234").write_text("data")
    os.makedirs(base / f"{LOCKED}rendezvo" / "rendezvous")
    (base / f"{LOCKED}rendezvo").chmod(0o700)
    target = base / "target"
    target.mkdir(mode=0o700)
    socket.socket(socket.AF_UNIX).bind(str(target / "input"))
    os.symlink(target, base / f"{LOCKED}link1234")
    os.mkdir(base / f"{LOCKED}nested12", 0o700)
    os.mkdir(base / f"{LOCKED}nested12" / "inner", 0o700)
    before = sorted(base.rglob("*"))
    remove_dead_folders()
    assert sorted(base.rglob("*")) == before


def test_a_folder_that_somebody_else_clears_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock it looks like one of a dead server."""
    names: list[str] = []
    make = tempfile.mkdtemp

    def mkdtemp(**how: Any) -> str:
        names.append(make(**how))
        if len(names) == 1:
            os.rmdir(names[0])
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    folder = LockedFolder()
    assert folder.path.is_dir() and len(names) == 2
    folder.remove()


def test_a_temporary_folder_that_cannot_be_listed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of /tmp with the mode 1733 only those who know a name can open it; root can always, so the folder is missing here."""
    monkeypatch.setattr(tempfile, "tempdir", str(base / "gone"))
    remove_dead_folders()
