"""Notebooks go stale while nobody looks: code that a saved output prints is the file's of today, lists are printed by the code that
they list, and what was measured is said by the cell that measured it, never by a text beside it.

What a cell prints from the code alone (its tag is `today`) is compared with the saved output when the notebook runs:
test_notebooks.py.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest
from test_notebooks import EACH, ROOT, SOURCES, build, committed, lab, read_source, said, tagged_all

from stage01_cli.main import COMMANDS

# --- code that an output prints

HEADER = re.compile(r"^# (\S+\.py): ([\w.]+)(?:, its lines (\d+) to (\d+))?$", re.M)
"""As `lab.source` prints it."""


def code_of(path: Path, name: str) -> list[str]:
    """The lines of a class or function, its decorators included. Raises KeyError if there is no such one."""
    text, body = path.read_text(encoding="utf-8"), ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = {
            node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        node = found[part]
        body = node.body
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return text.splitlines()[first - 1 : node.end_lineno]


def stale_code(output: str, root: Path) -> list[str]:
    """The names of those classes and functions in a printed text that are another one in the files below `root`."""
    stale = []
    for header in HEADER.finditer(output):
        path, name, first, last = header.groups()
        try:
            lines = code_of(root / path, name)
        except (OSError, KeyError):
            stale.append(f"{path}: {name} (gone)")
            continue
        today = "\n".join(lines[int(first or 1) - 1 : int(last) if last else None]).rstrip()
        if not output[header.end() + 1 :].startswith(today + "\n"):
            stale.append(f"{path}: {name}")
    return stale


@EACH
def test_code_that_an_output_prints_is_the_files(source: Path) -> None:
    code = [cell for cell in committed(source).cells if cell.cell_type == "code"]
    stale = [name for cell in code for name in stale_code(said(cell), ROOT)]
    assert not stale, (
        f"the code has changed since this notebook was built; run: make notebooks-build ARGS={source.name[:2]}"
    )
    calls = sum(cell.source.count("lab.source(") for cell in code)
    printed = sum(len(HEADER.findall(said(cell))) + said(cell).count("It is shown here when") for cell in code)
    assert printed >= calls  # what answers an exercise is not printed, and says so


def test_code_that_has_changed_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    @property\n    def b(self):\n        return 1\n\n\ndef c():\n    x = 1\n    y = 2\n    return x\n"
    )
    right = "# a.py: A.b\n    @property\n    def b(self):\n        return 1\n\n# a.py: c, its lines 2 to 3\n    x = 1\n    y = 2\n"
    assert stale_code(right, tmp_path) == []
    assert stale_code(right.replace("return 1", "return 2"), tmp_path) == ["a.py: A.b"]
    assert stale_code(right.replace("    y = 2\n", "    y = 3\n"), tmp_path) == ["a.py: c"]
    assert stale_code("# a.py: gone\n", tmp_path) == ["a.py: gone (gone)"]
    lab.source(lab.Server.close)
    lab.source(lab.claim, 2, 4)
    printed = capsys.readouterr().out
    assert len(HEADER.findall(printed)) == 2 and stale_code(printed, lab.ROOT) == []


# --- numbers in a text

UNIT = r"(?:[mµun]s|s|seconds?|(?:milli|micro|nano)seconds?|[kKMGT]i?B(?:/s)?|bytes/s|[MGT]FLOP/s|times|%|percent|tokens (?:a|per) second)(?![\w-])"
MEASURED = re.compile(
    rf"~?\d[\d,.]*(?:(?: to | ?[-–] ?)\d[\d,.]*)?[ -]?{UNIT}|\d[\d,.]*x(?!\w)|(?:\b(?:a|half a|tenth of a|fraction of a|few|ten|hundred) (?:milli|micro)seconds?)"
)
QUOTED = re.compile(r"\"[^\"]*\"|`[^`]*`|\]\([^)]*\)|about \d+ minutes with the exercise")
DESCRIPTIONS = (
    "Execution Flow",
    "Executive Summary",
    "Code Flow Trace",
    "Component Initialization",
    "REST API to Inference",
)
CONSTANTS = {
    ("13", "13 times"): "all-reduces of a step: 2 x 6 layers + 1, compared with the recording",
    ("13", "3 TB/s"): "assumed, for an estimate",
    ("15", "9 GiB"): "the claim of this entry, in the next cell",
    ("18", "10 ms"): "a bucket of the question, which is computed",
    ("18", "20 ms"): "another one",
    ("18", "10 to 20 ms"): "the two of them",
    ("18", "15 seconds"): "how often a monitor usually asks",
    ("19", "2 seconds"): "the flag that this notebook sets, and LAST_WORDS_SECONDS twice",
    ("20", "a millisecond"): "an order of magnitude",
}
"""(notebook, what its text says): why this is not of a run. Everything else is said by `lab.say`, `lab.claim`, `print` or a table."""


def sentences(text: str) -> Iterator[str]:
    """Of a markdown cell: list entries and rows of tables are sentences, too."""
    plain = re.sub(r"^> ?", "", text, flags=re.M)
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. |\||#)", plain):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z0-9`*(\"])", " ".join(block.split()))


def numbers_of_a_run(text: str) -> list[str]:
    """What a text says in milliseconds, bytes, times or percent, unless it is quoted or the sentence names the description that says it."""
    return [
        number
        for sentence in sentences(text)
        if not any(f"*{name}*" in sentence for name in DESCRIPTIONS)
        for number in MEASURED.findall(QUOTED.sub(" ", sentence))
    ]


@cache
def texts(source: Path) -> list[nbformat.NotebookNode]:
    """The markdown cells that state something: a prediction asks, and an exercise demands."""
    cells = (cell for cell in build.jupytext.read(source, fmt="py:percent").cells if cell.cell_type == "markdown")
    return [cell for cell in cells if not {"predict", "exercise"} & set(cell.metadata.get("tags", []))]


@EACH
def test_no_text_repeats_a_number_of_a_run(source: Path) -> None:
    found = [number for cell in texts(source) for number in numbers_of_a_run(cell.source)]
    unknown = [number for number in found if (source.name[:2], number.strip()) not in CONSTANTS]
    assert not unknown, "let the cell that measured it say it (lab.say, lab.claim); a constant is a row of CONSTANTS"


def test_each_constant_is_still_said() -> None:
    for notebook, number in CONSTANTS:
        (source,) = (path for path in SOURCES if path.name.startswith(notebook))
        assert number in [one.strip() for cell in texts(source) for one in numbers_of_a_run(cell.source)], number


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("A message takes 0.3 ms, the largest 2-5ms.", ["0.3 ms", "2-5ms"]),
        ("- It is 1.9 times as fast,\n  with 25 % less, 3x more.", ["1.9 times", "25 %", "3x"]),
        ("It takes a tenth of a millisecond or two.", ["tenth of a millisecond"]),
        ("It reads 10.8 GB/s, of 1,234 MB.", ["10.8 GB/s", "1,234 MB"]),
        ("They hold it for 10 to 40 ms.", ["10 to 40 ms"]),
        ('It says "~10-50ms".', []),
        ("*Execution Flow* gives 10 to 50 ms of 200 ms. Here it is 1 ms.", ["1 ms"]),
        ("| 10-50 ms of a request | *Execution Flow*, summary |", []),
        ("`sleep 3 s`, 16 tokens, 2 steps, 8 x 8, 4 workers, step 19", []),
    ],
)
def test_a_number_of_a_run_is_noticed(text: str, numbers: list[str]) -> None:
    assert numbers_of_a_run(text) == numbers


def test_a_sentence_of_a_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lab.say("It took 3 ms. " * 20)
    printed = capsys.readouterr().out
    assert "It took 3 ms." in printed and max(map(len, printed.splitlines())) <= 120


# --- lists


@EACH
def test_no_text_lists_the_subcommands(source: Path) -> None:
    """It would be short of one soon: the cell that reads COMMANDS prints them."""
    for cell in texts(source):
        assert len(set(re.findall(r"`(?:stages )?([a-z-]+)`", cell.source)) & set(COMMANDS)) < 4


def test_what_the_code_alone_decides_is_compared() -> None:
    """The lists of subcommands, settings, models, routes, refusals: see the end of test_the_notebook_runs_and_its_check_judges."""
    tagged = {source.name[:2]: len(tagged_all(read_source(source), "today")) for source in SOURCES}
    assert {name for name, count in tagged.items() if count} >= {"01", "02", "03", "05", "06"}
    (commands,) = (cell for cell in tagged_all(committed(SOURCES[1]), "today") if "COMMANDS" in cell.source)
    listed = re.findall(r"^([a-z-]+) +stage\S+ ", said(commands), re.M)
    assert listed == list(COMMANDS), "run: make notebooks-build ARGS=01"


def test_the_texts_are_read() -> None:
    assert all(textwrap.dedent(cell.source) for source in SOURCES for cell in texts(source)[:1])
