"""How sharp are the tests? Plant bugs in the project, one at a time, and count those that a test catches.

    python -m pytest -n 2 --dist loadfile --record     first: which functions each test executes
    python tests/power.py --minutes 30                 then as often as wanted, with --resume
    python tests/power.py --resume --tier all          what `make test` lets through, before the slow tests
    python tests/power.py --report

Each bug is planted in a copy of the project, and only the tests that reach its function run there, the cheapest first. Those of
`planted.toml` come before those drawn; what nobody could see is listed in `equivalent_bugs.toml`.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))

import fork_start
import psutil
import reach
import reach_hook

TESTS = Path(__file__).parent
LIBRARIES = (
    "torch numpy hypothesis pytest fastapi uvicorn zmq httpx msgspec tokenizers safetensors jinja2 yaml transformers"
)
COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
COMPARE |= {"is not": "is", "not in": "in"}
FIRST_BATCH, GROWTH = 20, 4
LEFT = ("survivor", "not judged")
TEXT = ("description", "help", "message", "metavar")
"""Keyword arguments that are for people to read."""


@dataclass(frozen=True)
class Bug:
    """One change: the bytes from `start` to `end` of the file become `new`."""

    file: str
    line: int
    function: str
    kind: str
    change: str
    start: int
    end: int
    new: str

    @property
    def id(self) -> str:
        return hashlib.sha1(f"{self.file} {self.function} {self.line} {self.start} {self.new}".encode()).hexdigest()[
            :12
        ]


class Places:
    """All changes that a file allows. None changes the number of its lines."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self._dump = file, source.encode(), ast.dump(ast.parse(source))
        self._bugs: list[Bug] = []
        self._starts = [0]
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        tree = ast.parse(source)
        self._functions = [(name, node) for name, node in reach_hook.functions(tree) if not reach_hook.is_read(node)]
        self._visit(tree)

    def drawn(self, line: int, seed: str) -> Iterator[Bug]:
        """One of the changes of a line, if there is one that is still Python, and something else."""
        there = [bug for bug in self._bugs if bug.line == line]
        for bug in random.Random(seed).sample(there, len(there)):
            try:
                tree = ast.parse(planted(self.source, bug))
            except SyntaxError:
                continue
            if ast.dump(tree) != self._dump:
                yield bug
                return

    def function(self, line: int) -> str:
        around = [(node.lineno, name) for name, node in self._functions if node.lineno <= line <= node.end_lineno]
        return max(around, default=(0, ""))[1]

    def _span(self, node: Any) -> tuple[int, int]:
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def _add(self, node: Any, kind: str, new: str, span: tuple[int, int] | None = None) -> None:
        start, end = span or self._span(node)
        old = self._text(start, end)
        change = f"{' '.join(old.split())[:150]} -> {' '.join(new.split())[:150]}"
        lines = old.count("\n") - new.count("\n")
        if lines > 0:
            new = new + "\n" * lines if new == "pass" else f"({new}{chr(10) * lines})"
        line = self.source[:start].count(b"\n") + 1
        self._bugs.append(Bug(self.file, line, self.function(line), kind, change, start, end, new))

    def _visit(self, node: ast.AST) -> None:
        text = ast.unparse(node) if isinstance(node, ast.expr | ast.Expr | ast.If) else ""
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if re.match(r"(logger|logging|warnings)\.", text) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        self._of_expression(node)
        self._of_statement(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns") or (isinstance(node, ast.keyword) and node.arg in TEXT):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    self._visit(each)

    def _of_expression(self, node: Any) -> None:
        if isinstance(node, ast.Compare):
            gap = self._span(node.left)[1], self._span(node.comparators[0])[0]
            operator = re.search(r"[<>=!]=?|is not|not in|\bis\b|\bin\b", self._text(*gap))
            if operator and (new := COMPARE.get(operator[0])):
                self._add(node, "comparison", self._text(*gap).replace(operator[0], new, 1), gap)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            gap = self._span(node.values[0])[1], self._span(node.values[1])[0]
            self._add(node, "and/or", self._text(*gap).replace(word, other, 1), gap)
            for value in node.values:
                self._add(value, "condition dropped", str(word == "and"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._add(node, "True/False", str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            self._add(node, "number", str(node.value + 1))
            self._add(node, "number", str(node.value - 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            self._add(node, "constant", repr(node.value * 2 + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[^\s%{}]+", node.value):
            self._add(node, "constant", repr(node.value + "x"))
        elif isinstance(node, ast.Await):
            self._add(node, "await left out", self._text(*self._span(node.value)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) not in ("min", "max", "isinstance"):
            for one, other in zip(node.args, node.args[1:]):
                (start, one_end), (two, end) = self._span(one), self._span(other)
                new = self._text(two, end) + self._text(one_end, two) + self._text(start, one_end)
                self._add(node, "arguments swapped", new, (start, end))

    def _of_statement(self, node: Any) -> None:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            self._add(node.test, "condition negated", f"not ({self._text(*self._span(node.test))})")
            self._add(node.test, "condition dropped", "True")
        kept = isinstance(node, ast.Assign) and all(isinstance(each, ast.Name | ast.Tuple) for each in node.targets)
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Delete | ast.Continue | ast.Break) and not kept:
            self._add(node, "statement left out", "pass")
        for argument in getattr(getattr(node, "args", None), "kw_defaults", []) + getattr(
            getattr(node, "args", None), "defaults", []
        ):
            if isinstance(argument, ast.Constant) and argument.value is None:
                self._add(argument, "default", "0")


def planted(source: bytes, bug: Bug) -> bytes:
    return source[: bug.start] + bug.new.encode() + source[bug.end :]


def listed(root: Path) -> Iterator[Bug]:
    """The bugs of planted.toml. Raises ValueError for one whose text is not there, or more than once."""
    for each in tomllib.loads((TESTS / "planted.toml").read_text())["bug"]:
        source = (root / each["file"]).read_text()
        if source.count(each["old"]) != 1:
            raise ValueError(f"planted.toml: {each['file']} has {source.count(each['old'])} times {each['old']!r}")
        start = len(source.partition(each["old"])[0].encode())
        line, change = source.encode()[:start].count(b"\n") + 1, f"{each['old'].strip()} -> {each['new'].strip()}"
        function = Places(each["file"], source).function(line)
        yield Bug(each["file"], line, function, "listed", change, start, start + len(each["old"].encode()), each["new"])


def drawn(sources: reach.Sources, number: int, seed: int, only: str) -> list[Bug]:
    """Some of all changes: every line has the same chance, and what one line allows."""
    files = [path for path in sources.project if re.search(only, path)]
    lines = [(path, line) for path in files for line in range(1, sources.text(path).count("\n") + 1)]
    random.Random(seed).shuffle(lines)
    places: dict[str, Places] = {}
    chosen: list[Bug] = []
    for path, line in lines:
        if len(chosen) < number:
            places[path] = places.get(path) or Places(path, sources.text(path))
            chosen += places[path].drawn(line, f"{seed} {path} {line}")
    return chosen


class Reached:
    """Which tests of the record can see a bug, the likeliest and cheapest first."""

    def __init__(self, record: dict[str, Any], sources: reach.Sources) -> None:
        self._tests, self._sources = record["tests"], sources
        self._masks = {test: reach.unpacked(each["reach"]) for test, each in record["tests"].items()}
        self._names = [name.partition("::") for name in record["names"]]
        self._closures: dict[str, set[str]] = {}

    def by(self, bug: Bug) -> list[str]:
        wanted = [path == bug.file and bug.function in ("", name) for path, _, name in self._names]
        mask = sum(1 << bit for bit, each in enumerate(wanted) if each)
        found = [
            test
            for test in self._tests
            if self._masks[test] & mask or (not bug.function and self._imports(test, bug.file))
        ]
        stem = Path(bug.file).stem
        return sorted(
            found, key=lambda test: (stem not in Path(test.partition("::")[0]).name, self._tests[test]["cpu"], test)
        )

    def seconds(self, tests: list[str]) -> float:
        return sum(self._tests[test]["cpu"] for test in tests)

    def _imports(self, test: str, file: str) -> bool:
        path = test.partition("::")[0]
        if path not in self._closures:
            self._closures[path] = self._sources.closure(path) if path in self._sources.files else set()
        return file in self._closures[path]


class Copy:
    """A copy of the project with a process that has the libraries loaded, which forks one for every batch of tests."""

    def __init__(self, sources: reach.Sources, more: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="power-"))
        for path in sources.files:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(sources.root / path, self.folder / path)
        self._written, self._more = time.time() - 1e6, more
        paths = ":".join(str(self.folder / each) for each in (".", "trace", "tests/support"))
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(self.folder / "tests/power.py"), "--forks", str(sources.root)]
        pipe = subprocess.PIPE
        self._forks = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=self.folder, env=environment)
        self._clean: dict[str, bool] = {}

    def write(self, file: str, content: bytes) -> None:
        """With a time that no file had before, by which Python knows that byte code is old."""
        self._written += 2
        (self.folder / file).write_bytes(content)
        os.utime(self.folder / file, (self._written, self._written))

    def run(self, tests: list[str], seconds: float) -> tuple[str, str]:
        """("passed", "failed" or "too slow", the first test that failed)."""
        request = {"tests": [*self._more, *sorted(tests)], "cpu": int(30 + 5 * seconds), "wall": 120 + 10 * seconds}
        assert self._forks.stdin is not None and self._forks.stdout is not None
        print(json.dumps(request), file=self._forks.stdin, flush=True)
        verdict, test = json.loads(self._forks.stdout.readline())
        if verdict == "imports the original":
            raise RuntimeError(f"a test imports what is not in the copy: {test}")
        return verdict, test

    def _run_with(self, bug: Bug, source: bytes, tests: list[str], seconds: float) -> tuple[str, str]:
        self.write(bug.file, planted(source, bug))
        try:
            return self.run(tests, seconds)
        finally:
            self.write(bug.file, source)

    def judge(self, bug: Bug, tests: list[str], reached: Reached) -> tuple[str, str]:
        """("caught", "too slow", "survivor", or "not judged" if no test reaches it, and the test). A test that fails without the bug too
        has no say."""
        say = 0
        source, size = (self.folder / bug.file).read_bytes(), FIRST_BATCH
        tests = [test for test in tests if self._clean.get(test, True)]
        while tests:
            batch, seconds = tests[:size], reached.seconds(tests[:size])
            verdict, test = self._run_with(bug, source, batch, seconds)
            if verdict == "passed":
                tests, size, say = tests[size:], size * GROWTH, say + len(batch)
                continue
            suspects = [test] if test in batch else batch
            if not all(self._clean.get(each) for each in suspects):
                well = self.run(suspects, seconds)
                for each in suspects if well[0] == "passed" else [well[1] or suspects[0]]:
                    self._clean[each] = well[0] == "passed"
            tests = [test for test in tests if self._clean.get(test, True)]
            if all(self._clean.get(each, True) for each in suspects):
                if verdict != "failed" or self._run_with(bug, source, suspects, seconds)[0] != "passed":
                    return ("caught" if verdict == "failed" else verdict), test
                tests = [test for test in tests if test not in suspects]  # it fails by chance
        return "survivor" if say else "not judged", f"{say} tests"

    def close(self) -> None:
        self._forks.terminate()
        self._forks.wait()
        shutil.rmtree(self.folder)


class First:
    """A plugin of pytest: which test failed first."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")


def forks(original: str) -> None:
    """The process of a `Copy`: a line with tests comes in, a line with a verdict goes out."""
    fork_start.libc.prctl(fork_start.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent comes here
    sys.path[:] = [
        each for each in sys.path if not Path(each, "tests", "power.py").exists() or each.startswith(os.getcwd())
    ]
    sys.path[:] = [each for each in sys.path if each not in (original, f"{original}/trace")]
    for name in LIBRARIES.split():
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    for name in ("reach", "reach_hook", "fork_start"):  # the tests load them themselves
        sys.modules.pop(name)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(in_a_fork(json.loads(line), original)), flush=True)


def in_a_fork(request: dict[str, Any], original: str) -> tuple[str, str]:
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu"], request["cpu"] + 5))
        first, pytest = First(), importlib.import_module("pytest")
        code = int(
            pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *request["tests"]], plugins=[first])
        )
        files = [str(getattr(module, "__file__", "")) for module in sys.modules.values()]
        wrong = [
            file
            for file in files
            if file.startswith(tuple(f"{original}/{each}" for each in (*reach.PROJECT, "tests/")))
        ]
        verdict = (
            ("imports the original", wrong[0]) if wrong else ("passed" if code in (0, 5) else "failed", first.failed)
        )
        os.write(tell, json.dumps(verdict).encode())
        os._exit(0)
    os.close(tell)
    os.set_blocking(told, False)
    answer = b""
    try:
        psutil.Process(child).wait(request["wall"])
        answer = os.read(told, 1 << 16)
    except (psutil.TimeoutExpired, BlockingIOError):
        pass
    os.close(told)
    while left := psutil.Process().children(recursive=True):
        for each in left:
            try:
                each.kill()
                each.wait(10)
            except psutil.Error:
                pass
    return tuple(json.loads(answer)) if answer else ("too slow", "")


def collected(sources: reach.Sources, *options: str) -> set[str] | None:
    """The tests that pytest finds, kept for as long as no file changes. None if it does not know an option."""
    kept = reach.FOLDER / f"collected-{reach.hashed(repr((sources.files, options)))}"
    if not kept.exists():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "-m", "not long", *options]
        found = subprocess.run(command, cwd=reach.ROOT, capture_output=True, text=True)
        if found.returncode != 0:
            return None
        kept.write_text("\n".join(line for line in found.stdout.splitlines() if "::" in line))
    return {*kept.read_text().splitlines()}


def group(file: str) -> str:
    """Under which name a file's bugs are counted."""
    head, features, _ = file.partition("/features/")
    return head + "/features" if features else file.split("/")[0]


def report(results: dict[str, dict[str, Any]]) -> None:
    """The share that is caught, by folder, and what is not."""
    same = tomllib.loads((TESTS / "equivalent_bugs.toml").read_text()).get("same", [])
    unseen = {(each["file"], each["function"], each["change"]) for each in same}
    counted = [each for each in results.values() if (each["file"], each["function"], each["change"]) not in unseen]
    survivors = [each for each in counted if each["verdict"] in LEFT]
    for each in sorted(survivors, key=lambda each: (each["file"], each["line"])):
        print(
            f"{each['file']}:{each['line']} {each['function']}: {each['kind']}: {each['change']}  ({each['tests']} tests, {each['tier']})"
        )
    total, missed = (Counter(group(each["file"]) for each in some) for some in (counted, survivors))
    for name, number in [*sorted(total.items()), ("all", len(counted))]:
        left = missed[name] if name != "all" else len(survivors)
        print(f"{name:45} {number - left:4} of {number:4} caught, {100 * (number - left) / max(1, number):3.0f} %")
    print(f"{len(results) - len(counted)} change nothing that anybody could see")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=300, help="how many bugs are drawn; 300")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression for the files that get bugs")
    parser.add_argument("--tests", default="", help="a regular expression for the tests that may run")
    parser.add_argument(
        "--tier",
        choices=("fast", "all"),
        default="fast",
        help="all: the slow tests too, on what the others let through",
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no bug after this time")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=reach.FOLDER / "power.jsonl")
    parser.add_argument("--resume", action="store_true", help="go on with these results, instead of anew")
    parser.add_argument("--report", action="store_true", help="only print what the results say")
    parser.add_argument("--forks", help=argparse.SUPPRESS)
    return parser.parse_args()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Bug -> its newest result."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {each["id"]: each for each in map(json.loads, lines)}


def main() -> None:
    """Plant, judge, report."""
    args = arguments()
    if args.forks:
        return forks(args.forks)
    results = read(args.results) if args.resume or args.report else {}
    if args.report:
        return report(results)
    record, sources = reach.recorded(), reach.Sources.read(reach.ROOT, (reach.recorded() or {}).get("files"))
    if record is None:
        sys.exit("There is no record yet: run pytest --record first.")
    fast = collected(sources)
    everything = collected(sources, "--all") if args.tier == "all" else None
    assert fast is not None, "pytest cannot collect the tests"
    allowed = {test for test in everything or fast if re.search(args.tests, test)}
    if not allowed & record["tests"].keys():
        sys.exit("None of these tests is in the record.")
    print(f"{len(allowed - record['tests'].keys())} of {len(allowed)} tests are not in the record, and do not run")
    again = {name for name, each in results.items() if each["verdict"] not in LEFT or args.tier == each["tier"]}
    bugs = [*listed(reach.ROOT), *drawn(sources, args.draw, args.seed, args.only)]
    waiting = [bug for bug in bugs if bug.id not in again and re.search(args.only, bug.file)]
    reached, end, lock = Reached(record, sources), time.monotonic() + 60 * args.minutes, threading.Lock()
    if not args.resume:
        args.results.unlink(missing_ok=True)

    def work() -> None:
        copy = Copy(sources, ["--all"] if everything else [])
        try:
            while time.monotonic() < end:
                with lock:
                    if not waiting:
                        return
                    bug = waiting.pop(0)
                    tests = [
                        test
                        for test in reached.by(bug)
                        if test in allowed and (bug.id not in results or test not in fast)
                    ]
                began = time.monotonic()
                verdict, test = copy.judge(bug, tests, reached)
                result = {
                    "id": bug.id,
                    **asdict(bug),
                    "verdict": verdict,
                    "test": test,
                    "tests": len(tests),
                    "tier": args.tier,
                }
                with lock, args.results.open("a") as file:
                    results[bug.id] = result | {"seconds": round(time.monotonic() - began, 1)}
                    file.write(json.dumps(results[bug.id]) + "\n")
                    print(f"{verdict:8} {bug.file}:{bug.line} {bug.kind}: {bug.change}  {test}", flush=True)
        finally:
            copy.close()

    threads = [threading.Thread(target=work) for _ in range(args.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(results)


if __name__ == "__main__":
    main()
