"""Which functions of the project does each test execute, in its own process and in those that it starts? A plugin of pytest.

`pytest --record` runs the tests and notes it in `.pytest_cache/reach/record.json`. `pytest --changed` runs what can be affected by the
difference between the sources and that record, and brings it up to date. `reach_hook.py` has what a process does to note.
The record cannot see a result that one test file leaves in a cache of its process for the next. (PYTEST_DONT_REWRITE: it has no asserts.)
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import json
import marshal
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import reach_hook

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".pytest_cache" / "reach"
RECORD = FOLDER / "record.json"
PROJECT = ("stage01_cli/", "stage02_server/", "stage03_engine/", "stage04_kernels/", "trace/stagetrace/")
START = (
    """import os; "REACH" in os.environ and exec(open(os.environ["REACH"] + ".py").read(), {"__name__": "reach"})\n"""
)
"""What Python executes at the start of each process of this environment, from a file `reach.pth`."""
READS_SOURCES = re.compile(r"\bast\b|getsource|copytree|glob\(|\.py\"|\bgit\b")
"""In a test file: it may depend on the text of the sources, and not on what is executed."""
READS_MARKDOWN = ("tests/test_readme.py", "tests/notebooks/", "tests/stage01_cli/test_book.py")
OPTIONS = {"--record": "note which functions each test executes", "--changed": "run what differences since can affect"}
DIGITS = bytes([48, 49]) + bytes(254)


def hashed(text: str | bytes) -> str:
    return hashlib.sha1(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def parsed(source: bytes) -> dict[str, Any]:
    """Hashes of a file: of each function, and of what is executed when it is imported; and what its import imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file that a test is about
        return {"functions": {}, "module": hashed(source), "imports": []}
    found = [*reach_hook.functions(tree)]
    hashes = {name: hashed(ast.dump(node)) for name, node in found}
    imports = {name for node in _at_import(tree) for name in _names(node)}
    for _, node in found:
        if not reach_hook.is_read(node):  # its body is what the module holds
            node.body, node.args = [], ast.arguments([], [], None, [], [], None, [])
    return {"functions": hashes, "module": hashed(ast.dump(tree)), "imports": sorted(imports)}


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _at_import(node)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    return []


class Sources:
    """All files of a checkout, with their hashes. `files`: path -> {"sha", and of Python's what `parsed` says}."""

    def __init__(self, root: Path, files: Mapping[str, dict[str, Any]]) -> None:
        self.root, self.files = root, dict(files)
        self.functions = [f"{file}::{name}" for file in self.project for name in self.files[file]["functions"]]

    @classmethod
    def read(cls, root: Path, before: Mapping[str, dict[str, Any]] | None = None) -> Sources:
        """Those on the disk. What has the hash that it had `before` is not parsed again."""
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
        files = {}
        for path in sorted({each for each in listed if each and (root / each).is_file()}):
            content = (root / path).read_bytes()
            known = (before or {}).get(path, {})
            more = {} if not path.endswith(".py") else parsed(content) if known.get("sha") != hashed(content) else known
            files[path] = {**more, "sha": hashed(content)}
        return cls(root, files)

    @property
    def project(self) -> list[str]:
        return [path for path in self.files if path.startswith(PROJECT) and path.endswith(".py")]

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """Dotted name -> file."""
        names = {path: re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".") for path in self.project}
        return {name.removeprefix("trace."): path for path, name in names.items()}

    @functools.cache  # noqa: B019 - there are one or two of these in a process
    def text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8", errors="replace")

    @functools.cache  # noqa: B019
    def uses(self, path: str) -> set[str]:
        """The files that this one needs: what it imports, for a file of the project when it is imported; of the tests' other files all that
        it names, as some are run by their name."""
        if path in self.project:
            found = {self.modules[name] for name in self.files[path]["imports"] if name in self.modules}
            return found | {f"{folder}/__init__.py" for folder in map(str, Path(path).parents)} & self.files.keys()
        words = set(re.findall(r"\w+", self.text(path)))
        dotted = set(re.findall(r"[\w.]+", self.text(path)))
        named = {name for node in ast.walk(ast.parse(self.text(path))) for name in _names(node)} | dotted
        found = {self.modules[name] for name in named if name in self.modules}
        helpers = {each for each in self.tests if Path(each).stem in words or Path(each).parent.name in words}
        above = {f"{folder}/conftest.py" for folder in Path(path).parents}
        return found | {each for each in helpers if not Path(each).name.startswith("test_")} | above & self.files.keys()

    @property
    def tests(self) -> list[str]:
        return [path for path in self.files if path.startswith("tests/") and path.endswith(".py")]

    def closure(self, path: str) -> set[str]:
        """The file, and all that it needs directly or indirectly."""
        found, waiting = {path}, [path]
        while waiting:
            more = self.uses(waiting.pop()) - found
            found |= more
            waiting += more
        return found


def packed(mask: int) -> str:
    return base64.b85encode(zlib.compress(mask.to_bytes(mask.bit_length() // 8 + 1, "little"))).decode()


def unpacked(text: str) -> int:
    return int.from_bytes(zlib.decompress(base64.b85decode(text)), "little") if text else 0


def affected(record: Mapping[str, Any], now: Sources) -> set[str]:
    """The recorded tests whose outcome may differ from the recorded one, and those that were to run again anyway."""
    then, tests = record["files"], record["tests"]
    differ = {
        path for path in {*then, *now.files} if then.get(path, {}).get("sha") != now.files.get(path, {}).get("sha")
    }
    code = {path for path in differ if path.startswith(PROJECT) and path.endswith(".py")}
    own = {path for path in differ if path.startswith("tests/") and path.endswith(".py")}
    markdown = {path for path in differ if path.endswith(".md")}
    notebooks = {path for path in differ - markdown if path.startswith("notebooks/")}
    if differ - code - own - markdown - notebooks:
        return {*tests}
    empty: dict[str, Any] = {"functions": {}, "module": ""}
    old, new = ({path: side.get(path, empty) for path in code} for side in (then, now.files))
    modules = {path for path in code if old[path]["module"] != new[path]["module"]}
    functions, at_import = 0, unpacked(record["imports"])
    names = [name.partition("::") for name in record["names"]]
    changed = [path in code and old[path]["functions"].get(n) != new[path]["functions"].get(n) for path, _, n in names]
    modules |= {path for bit, (path, _, _) in enumerate(names) if changed[bit] and at_import >> bit & 1}
    for bit, (path, _, _) in enumerate(names):
        functions |= (changed[bit] or path in modules) << bit
    files = {test.partition("::")[0] for test in tests}
    whole = {file for file in files if unpacked(record["shared"].get(file, "")) & functions}
    for file in {file for file in files if file in now.files} - whole:
        text = now.text(file)
        reads = (code | own and READS_SOURCES.search(text)) or (notebooks and "notebook" in text)
        reads = reads or (markdown and (".md" in text or "README" in text or file.startswith(READS_MARKDOWN)))
        if reads or now.closure(file) & (modules | own):
            whole.add(file)
    return {
        test for test, each in tests.items()
        if each["stale"] or test.partition("::")[0] in whole or unpacked(each["reach"]) & functions
    }  # fmt: skip


def merged(
    record: dict[str, Any] | None, now: Sources, lines: Iterable[Mapping[str, Any]], passed: set[str]
) -> dict[str, Any]:
    """The record after a run. A number in it stays that of the same function."""
    record = record or {"names": [], "files": now.files, "imports": "", "tests": {}, "shared": {}}
    again = affected(record, now)
    number = {name: place for place, name in enumerate(record["names"])}
    places = [number.setdefault(name, len(number)) for name in now.functions]

    def theirs(text: str) -> int:
        return sum(1 << places[bit] for bit, digit in enumerate(reversed(f"{unpacked(text):b}")) if digit == "1")

    for line in lines:
        record["imports"] = packed(unpacked(record["imports"]) | theirs(line.get("imports", "")))
        if test := line.get("test"):
            file = test.partition("::")[0]
            record["tests"][test] = {"reach": packed(theirs(line["reach"])), "cpu": line["cpu"], "stale": False}
            record["shared"][file] = packed(unpacked(record["shared"].get(file, "")) | theirs(line["shared"]))
            again.add(test)
    for test, each in record["tests"].items():
        each["stale"] = test in again and test not in passed
    known = {test: each for test, each in record["tests"].items() if test.partition("::")[0] in now.files}
    return record | {"names": [*number], "files": now.files, "tests": known}


def recorded() -> dict[str, Any] | None:
    return json.loads(RECORD.read_text()) if RECORD.exists() else None


def _prepare() -> Sources:
    """In the process that decides: everything that the others need."""
    now = Sources.read(ROOT, (recorded() or {}).get("files"))
    for part in (*FOLDER.glob("*.lines"), *FOLDER.glob("selected")):
        part.unlink()
    (FOLDER / "code").mkdir(parents=True, exist_ok=True)
    first, table = 0, {}
    for path in now.project:
        key = f"{hashed(path)}-{now.files[path]['sha']}-{first}"
        table[str(ROOT / path)] = (first, (ROOT / path).stat().st_mtime_ns, key)
        first += len(now.files[path]["functions"])
    (FOLDER / "table").write_bytes(marshal.dumps(table))
    for kept in (FOLDER / "code").iterdir():
        if kept.name.partition(".")[0] not in {key for _, _, key in table.values()}:
            kept.unlink()
    start = Path(sysconfig.get_path("purelib"), "reach.pth")
    if not start.exists() or start.read_text() != START:
        start.write_text(START)
    return now


def _begin(name: str, size: int) -> None:
    path = FOLDER / name
    path.write_bytes(bytes(size))
    shutil.copy(reach_hook.__file__, f"{path}.py")
    with open(f"{path}.py", "a") as file:
        file.write(
            '\ntry:\n    install(os.environ["REACH"])\nexcept OSError:\n    pass  # a process that may not read\n'
        )
    os.environ["REACH"] = str(path)
    reach_hook.install(str(path))


_now: Sources | None = None
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if "REACH" not in os.environ and any(option in sys.argv for option in OPTIONS):
    _now = _prepare()
    _begin("all", max(1, len(_now.functions)))
elif os.environ.get("REACH") == str(FOLDER / "all") and _worker:
    _begin(_worker, (FOLDER / "all").stat().st_size)
else:  # nothing is recorded, or this is a process of a test
    _worker = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, text in OPTIONS.items():
        parser.addoption(option, action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if _now is not None:
        config.pluginmanager.register(Writer(_now, config.getoption("--changed")))
    if _worker or (_now is not None and not config.getoption("numprocesses", 0)):
        config.pluginmanager.register(Recorder(FOLDER / f"{_worker}.lines", config.getoption("--changed")))


class Writer:
    """In the process that decides: says which tests run, and writes the record."""

    def __init__(self, now: Sources, changed: bool) -> None:
        self._now, self._record, self._outcomes = now, recorded(), dict[str, bool]()
        if changed and self._record is not None:
            again = affected(self._record, now)
            (FOLDER / "selected").write_text(json.dumps([test for test in self._record["tests"] if test not in again]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes[report.nodeid] = self._outcomes.get(report.nodeid, True) and not report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        lines = [json.loads(line) for part in FOLDER.glob("*.lines") for line in part.read_text().splitlines()]
        passed = {test for test, well in self._outcomes.items() if well}
        RECORD.with_suffix(".new").write_text(json.dumps(merged(self._record, self._now, lines, passed)))
        os.replace(RECORD.with_suffix(".new"), RECORD)


class Recorder:
    """In a process that runs tests: a line in a file for each."""

    def __init__(self, lines: Path, changed: bool) -> None:
        self._lines, self._changed = lines.open("w", buffering=1), changed
        self._test = self._shared = 0

    def _take(self) -> int:
        """The functions executed since it was last asked, of which it keeps the account of the test."""
        import builtins

        stored = builtins.__reach__  # type: ignore[attr-defined]
        mask = int(stored[:][::-1].translate(DIGITS), 2)
        for bit, digit in enumerate(reversed(f"{mask:b}")):
            if digit == "1":
                stored[bit] = 0
        self._test |= mask
        return mask

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._changed and (FOLDER / "selected").exists():
            spared = {*json.loads((FOLDER / "selected").read_text())}
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in spared])
            items[:] = [item for item in items if item.nodeid not in spared]

    def pytest_collection_finish(self) -> None:
        self._lines.write(json.dumps({"imports": packed(self._take())}) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        self._take()
        try:
            return (yield)
        finally:
            mask = self._take()
            self._shared |= mask if fixturedef.scope != "function" else 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._take()
        self._test = self._shared = 0
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self._take()
            line = {"test": item.nodeid, "reach": packed(self._test), "shared": packed(self._shared)}
            self._lines.write(json.dumps(line | {"cpu": round(sum(os.times()[:4]) - before, 3)}) + "\n")
