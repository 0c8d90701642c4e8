"""Which tests a change can affect, and what a process notes that is killed."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reach
import reach_hook

MODULE = '''"""A module."""
LIMIT = 1


def f():
    return LIMIT


def g():
    """Says two."""
    return 2
'''
FILES = {
    "stage03_engine/__init__.py": "",
    "stage03_engine/a.py": MODULE,
    "stage03_engine/b.py": "from stage03_engine.a import f\n",
    "tests/conftest.py": "",
    "tests/support/helper.py": "from stage03_engine import b\n",
    "tests/test_one.py": "import helper\n",
    "tests/test_two.py": "'README.md'\n",
    "tests/test_three.py": "",
    "README.md": "",
    "numbers.json": "",
}
ONE, TWO, THREE = "tests/test_one.py::test", "tests/test_two.py::test", "tests/test_three.py::test"


def lay_out(folder: Path) -> reach.Sources:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return reach.Sources.read(folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("stage03_engine/a.py", "return LIMIT", "return LIMIT + 1", {ONE}),
        ("stage03_engine/a.py", "return 2", "return 3", {TWO}),
        ("stage03_engine/a.py", "def f()", "def f(a=3)", {ONE}),
        ("stage03_engine/a.py", "LIMIT = 1", "LIMIT = 1  # a comment", set()),
        ("stage03_engine/a.py", "LIMIT = 1", "LIMIT = 2", {ONE, TWO}),  # who imports it, and who executed some of it
        ("stage03_engine/a.py", "def g()", "def h()", {ONE, TWO}),
        ("stage03_engine/b.py", "import f", "import g", {ONE}),
        ("stage03_engine/c.py", "", "NEW = 1", set()),
        ("tests/support/helper.py", "b", "a", {ONE}),
        ("tests/test_three.py", "", "pass", {THREE}),
        ("tests/conftest.py", "", "pass", {ONE, TWO, THREE}),
        ("README.md", "", "Read me.", {TWO}),
        ("numbers.json", "", "1", {ONE, TWO, THREE}),
    ],
)
def test_what_a_change_can_affect(tmp_path: Path, file: str, old: str, new: str, expected: set[str]) -> None:
    before = lay_out(tmp_path)
    assert before.functions == ["stage03_engine/a.py::f", "stage03_engine/a.py::g"]
    lines = [
        {"test": name, "reach": reach.packed(mask), "shared": "", "cpu": 0}
        for name, mask in ((ONE, 1), (TWO, 2), (THREE, 0))
    ]
    record = reach.merged(None, before, lines, {ONE, TWO, THREE})
    text = (tmp_path / file).read_text() if (tmp_path / file).exists() else ""
    (tmp_path / file).write_text(text.replace(old, new, 1))
    after = reach.Sources.read(tmp_path, before.files)
    assert reach.affected(record, after) == expected
    later = reach.merged(record, after, lines[:1], {ONE})  # only one of them ran
    assert reach.affected(later, after) == expected - {ONE}
    later = reach.merged(later, after, lines, {TWO})
    assert reach.affected(later, after) == {ONE, THREE}, "what failed runs again"


def test_a_function_keeps_its_number_when_others_come_and_go(tmp_path: Path) -> None:
    before = lay_out(tmp_path)
    line = {"test": TWO, "reach": reach.packed(2), "shared": "", "cpu": 0}
    record = reach.merged(None, before, [line], {TWO})
    (tmp_path / "stage03_engine/a.py").write_text("def e():\n    pass\n\n\n" + MODULE)
    now = reach.Sources.read(tmp_path)
    record = reach.merged(record, now, [line | {"reach": reach.packed(0b101)}], {TWO})
    assert [name.partition("::")[2] for name in record["names"]] == ["f", "g", "e"]
    assert reach.unpacked(record["tests"][TWO]["reach"]) == 0b110


def test_a_child_that_is_killed_has_noted_what_it_executed(tmp_path: Path) -> None:
    module, store = tmp_path / "module.py", tmp_path / "main"
    module.write_text(MODULE)
    (tmp_path / "code").mkdir()
    (tmp_path / "table").write_bytes(marshal.dumps({str(module): (3, module.stat().st_mtime_ns, "key")}))
    program = f"""if True:
        import os, sys, {reach_hook.__name__} as hook
        hook.install(sys.argv[1])
        import module
        if os.fork() == 0:
            assert module.g() == 2 and module.g.__doc__ and module.g.__code__.co_firstlineno == 9
            os.kill(os.getpid(), 9)
        os.wait()
        """
    paths = os.pathsep.join([str(tmp_path), str(Path(reach_hook.__file__).parent)])
    for _ in range(2):  # the second finds the code that the first has kept
        store.write_bytes(bytes(6))
        subprocess.run([sys.executable, "-c", program, str(store)], env={"PYTHONPATH": paths}, check=True)
        assert store.read_bytes() == bytes([0, 0, 0, 0, 1, 0])
    assert not (tmp_path / "__pycache__").exists()
