"""Where CI is set, a run fails that leaves a file in the project's folder, or changes one."""

from __future__ import annotations

import subprocess

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("act", ["write_text('')", "parent.joinpath('kept').write_text('other')", "exists()"])
def test_what_is_left_is_named(act: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(test_it=f"from pathlib import Path\ndef test_it(): Path('new').absolute().{act}")
    for name, text in {".gitignore": "__pycache__", "kept": "as it is", "tests.txt": "not added"}.items():
        (pytester.path / name).write_text(text)
    subprocess.run("git init -q && git add .gitignore kept test_it.py", shell=True, check=True, cwd=pytester.path)
    ended = pytester.runpytest_inprocess("-p", "left_files", "-p", "no:cacheprovider", "-p", "no:schemathesis")
    left = [line for line in ended.outlines if line.startswith("left in the project's folder: ")]
    assert bool(left) == (act != "exists()") and ended.ret == len(left)
