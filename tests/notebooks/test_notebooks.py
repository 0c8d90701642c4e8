"""Every notebook: the committed .ipynb is what its source says, it runs, and what it points to exists.

A few of them are run in `make test`; of the others it is known there that what they name in the project is there and can be called so.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import fork_start
import nbformat
import pytest
from answers import ANSWERS, Answer

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))
import build  # noqa: E402
import glossary  # noqa: E402
import lab  # noqa: E402
import map_lines  # noqa: E402

SOURCES = build.sources()
EACH = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
MAX_BYTES = 400_000
AS_A_USER = {"01_cli": "what a command imports", "05_engine_core": "children, memory and libraries of processes"}
"""The notebooks whose processes start as a user starts them, and why."""
UNWRITTEN = re.compile(r"NOT YET DONE: \S+ is still to be written\.\n")


read_source = cache(build.read_source)


@cache
def committed(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_there_is_one_source_for_each_notebook() -> None:
    assert SOURCES and {path.stem for path in build.FOLDER.glob("*.ipynb")} == {path.stem for path in SOURCES}
    numbers = [path.name[:2] for path in SOURCES]
    assert numbers == [f"{i:02d}" for i in range(len(SOURCES))]
    readme = (build.FOLDER / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in SOURCES if f"({path.stem}.ipynb)" not in readme]


def is_the_readers(cell: nbformat.NotebookNode) -> bool:
    """Guesses and answers are written there; they are nobody's mistake."""
    return cell.cell_type == "code" and bool({"exercise", "predict"} & set(cell.metadata.get("tags", [])))


def cells_of(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[str]]]:
    """What a notebook and its source have in common, whatever a reader did in it."""
    return [
        (cell.cell_type, "" if is_the_readers(cell) else cell.source, cell.metadata.get("tags", []))
        for cell in notebook.cells
    ]


def is_as_built(notebook: nbformat.NotebookNode, source: Path) -> bool:
    """Whether no reader has written in it, opened an output, or let Jupyter save it (which notes the version of Python)."""
    cells = [[(cell.id, cell.source, cell.metadata) for cell in one.cells] for one in (notebook, read_source(source))]
    return cells[0] == cells[1] and "version" not in notebook.metadata.language_info


@pytest.fixture
def built(source: Path) -> nbformat.NotebookNode:
    """The notebook as the build wrote it. Skips one in which a reader works; such a one is never committed."""
    notebook = committed(source)
    if not is_as_built(notebook, source):
        git = ["git", "diff", "--quiet", "HEAD", "--", str(source.with_suffix(".ipynb"))]
        assert subprocess.run(git, cwd=ROOT).returncode, "run: make notebooks-build"
        pytest.skip("a reader works in it")
    return notebook


@EACH
def test_the_notebook_is_its_source(source: Path) -> None:
    assert cells_of(committed(source)) == cells_of(read_source(source)), "run: make notebooks-build"


@EACH
def test_the_built_notebook_has_outputs_and_no_errors(source: Path, built: nbformat.NotebookNode) -> None:
    path = source.with_suffix(".ipynb")
    code = [cell for cell in built.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and all(cell.execution_count for cell in code)
    assert not [output for output in outputs if output.output_type == "error"]
    assert path.stat().st_size < MAX_BYTES
    assert UNWRITTEN.fullmatch(said(tagged(built, "check")))
    text = json.dumps(outputs)
    assert "holds: " in text and lab.NOT_HERE not in text and "you guessed" not in text
    assert "Falling back" not in text and "Warning" not in text
    assert not re.search(r"/(home|root|work)/|/tmp/[a-z]\w*/(?!stages-)", text), "a path of some machine"


def test_what_a_reader_writes_is_no_difference() -> None:
    source = SOURCES[0]
    mine, theirs = deepcopy(committed(source)), deepcopy(committed(source))
    tagged(mine, "exercise").source = ANSWERS[source.stem].right
    guess = next(cell for cell in mine.cells if "lab.predict(" in cell.source)
    guess.source = guess.source.replace("None", "7")
    guess.outputs = tagged(mine, "check").outputs = []
    assert cells_of(mine) == cells_of(theirs) and not is_as_built(mine, source)
    tagged(mine, "check").source += "\nprint()"
    assert cells_of(mine) != cells_of(theirs)
    theirs.metadata.language_info.version = "3.12.1"  # as JupyterLab saves it
    assert not is_as_built(theirs, source)


@EACH
def test_a_reader_finds_question_prediction_and_exercise(source: Path) -> None:
    cells = read_source(source).cells
    tags = [(cell.cell_type, tag) for cell in cells for tag in cell.metadata.get("tags", [])]
    assert "**Question.**" in cells[0].source
    kinds = [("markdown", "predict"), ("markdown", "exercise"), ("code", "exercise"), ("code", "check")]
    places = [tags.index(kind) for kind in kinds]
    assert places == sorted(places)
    for cell in cells:
        if cell.cell_type == "markdown" and "predict" in cell.metadata.get("tags", []):
            assert cell.source.startswith("> **Predict.**")
    assert re.search(r"`(v1|entrypoints|engine|model_executor|utils)[/.]", "\n".join(c.source for c in cells))


@EACH
def test_a_page_in_a_frame_has_its_picture_beside_it(source: Path) -> None:
    """Hosts of notebooks leave frames out, and so does Jupyter where it does not trust one."""
    cells = committed(source).cells
    for place, cell in enumerate(cells):
        if "<iframe" in json.dumps(cell.get("outputs", [])):
            beside = "".join(each.source for each in cells[place - 1 : place + 2] if each.cell_type == "markdown")
            shown = re.findall(r"^!\[([^\]]{40,})\]\(([^)]+)\)$", beside, re.M)
            assert shown and all((build.FOLDER / file).is_file() for _, file in shown), cell.id


DESCRIPTIONS = re.findall(r"^\| (\*[^*|]+\*) \|", (build.FOLDER / "MAP.md").read_text(encoding="utf-8"), re.M)


@EACH
def test_what_is_often_said_names_who_says_it_and_is_looked_at(source: Path) -> None:
    """Each entry of such a list names a description of the map; the next cell has a claim for each."""
    cells = read_source(source).cells
    assert len(DESCRIPTIONS) == 5
    for cell, claims in pairwise(cells):
        if "**What is often said**" in cell.source:
            entries = re.split(r"^> - ", cell.source, flags=re.M)[1:]
            assert entries and not [entry for entry in entries if not any(name in entry for name in DESCRIPTIONS)]
            assert claims.source.count("lab.claim(") == len(entries)
            assert "(MAP.md)" in cell.source


def test_a_claim_that_does_not_hold_is_noticed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lab.claim("two is more than one", 2 > 1)
    assert capsys.readouterr().out == "holds: two is more than one\n"
    with pytest.raises(AssertionError, match="does not hold in this run: one is more than two"):
        lab.claim("one is more than two", 1 > 2)
    # on a busy machine: the reader's notebook goes on, a built one is not written
    lab.claim("it was fast", False, measured=True)
    output = nbformat.v4.new_output("stream", name="stdout", text=capsys.readouterr().out)
    cell = nbformat.v4.new_code_cell("", outputs=[output])
    with pytest.raises(build.NotHereError, match="is the machine busy.*it was fast"):
        build.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "x.ipynb")
    assert not list(tmp_path.iterdir())
    build.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "x.ipynb", anyway=True)
    assert "build it again" in capsys.readouterr().err and "it was fast" in (tmp_path / "x.ipynb").read_text()


def test_without_the_project_the_first_cell_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    exec(build.SETUP, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"make notebooks.*pip install.*--editable '\.\[notebooks\]'"):
        exec(build.SETUP, {})


def broken_links(text: str, folder: Path) -> list[str]:
    """Links to files that do not exist, and names in link texts that the linked Python file does not define."""
    broken = []
    for label, target in re.findall(r"(?<!!)\[([^\[\]]+)\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text):
        if target.startswith(("http", "#")):
            continue
        path = folder / target.partition("#")[0]
        if not path.exists():
            broken.append(target)
        elif path.suffix == ".py":
            names = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", label)
            broken += [
                f"{name} in {target}"
                for name in names
                if not name.endswith(".py") and name not in map_lines.definitions(path)
            ]
    return broken


@EACH
def test_links_lead_to_what_exists(source: Path) -> None:
    text = "\n".join(cell.source for cell in read_source(source).cells if cell.cell_type == "markdown")
    assert re.search(r"\]\(\.\./(stage|trace)\S+\.py\)", text), "a notebook links the code that it is about"
    assert not broken_links(text, build.FOLDER)


@pytest.mark.parametrize("page", [build.FOLDER / "README.md", *map_lines.PAGES], ids=lambda path: path.name)
def test_links_of_a_page_lead_to_what_exists(page: Path) -> None:
    assert not broken_links(page.read_text(encoding="utf-8"), page.parent)


@pytest.mark.parametrize("page", map_lines.PAGES, ids=lambda path: path.name)
def test_the_maps_links_lead_to_the_line(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count(".py#L") > 30
    assert text == map_lines.lined(text, page.parent), "code has moved; run: make notebooks-build ARGS=MAP"


def test_a_line_that_has_moved_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x: int = 1\n\n\nclass A:\n    y: int\n\n    async def b(self): ...\n")
    right = "[`A.b`](a.py#L7) [`A.y`](a.py#L5) [`x`](a.py#L1) [`gone`](a.py) [`A`](b.py) [`a.py`](a.py)"
    assert map_lines.lined(re.sub(r"#L\d", "#L3", right), tmp_path) == right
    assert map_lines.lined(right.replace("#L1", ""), tmp_path) == right


def test_each_description_has_its_page() -> None:
    linked = re.findall(r"\]\((map/\w+\.md)\) \|$", map_lines.PAGES[0].read_text(encoding="utf-8"), re.M)
    assert [f"map/{path.name}" for path in map_lines.PAGES[1:]] == sorted(linked) and len(linked) == len(DESCRIPTIONS)


def test_a_broken_link_is_noticed() -> None:
    folder = build.FOLDER
    scheduler = "../stage03_engine/core/scheduler.py"
    assert (
        broken_links(f"[`Scheduler.schedule`]({scheduler}) [`Scheduler`]({scheduler}) [web](https://x.org)", folder)
        == []
    )
    assert broken_links(f"[`Scheduler.plan`]({scheduler})", folder) == [f"Scheduler.plan in {scheduler}"]
    assert broken_links("[text](../stage03_engine/scheduler.py)", folder) == ["../stage03_engine/scheduler.py"]


def tagged(notebook: nbformat.NotebookNode, tag: str) -> nbformat.NotebookNode:
    """The one code cell with this tag."""
    (cell,) = tagged_all(notebook, tag)
    return cell


def tagged_all(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    """All code cells with this tag."""
    return [c for c in notebook.cells if c.cell_type == "code" and tag in c.metadata.get("tags", [])]


def answered(notebook: nbformat.NotebookNode, answer: Answer) -> list[nbformat.NotebookNode]:
    """Cells to put at the end: the right answer, its check, and what runs once it passed; the wrong one, and its check."""
    make, check = nbformat.v4.new_code_cell, tagged(notebook, "check").source
    after = [cell.source for cell in notebook.cells if cell.cell_type == "code" and "if passed:" in cell.source]
    return [make(source) for source in (answer.right, check, *after, answer.wrong, check)]


def test_each_notebook_has_a_right_and_a_wrong_answer() -> None:
    assert ANSWERS.keys() == {path.stem for path in SOURCES}


@EACH
def test_the_exercise_begins_unwritten(source: Path) -> None:
    """Signatures and contracts, and nothing else to guess: each function raises NotImplementedError."""
    tree = ast.parse(tagged(read_source(source), "exercise").source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert functions
    for function in functions:
        assert ast.unparse(function.body[-1]) == "raise NotImplementedError"
        arguments = [one for one in function.args.args if one.arg != "self"]
        assert function.returns and all(one.annotation for one in arguments)


PROJECT = {"stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "stagetrace", "lab"}


def wrong_names(code: str) -> list[str]:
    """What code imports of the project, or looks up in it, and is not there; and calls of it that its signatures refuse."""
    nodes = list(ast.walk(compile(code, "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)))
    known: dict[str, Any] = {}
    wrong = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if str(module).partition(".")[0] in PROJECT:
                try:
                    exec(ast.unparse(node), known)
                except ImportError as error:
                    wrong.append(str(error))
    for node in nodes:  # a name of the notebook's own may be anything
        for own in (getattr(node, "arg", None), getattr(node, "name", None), getattr(node, "id", None)):
            if not isinstance(node, ast.keyword | ast.alias) and not isinstance(getattr(node, "ctx", None), ast.Load):
                known.pop(str(own), None)

    def meant(node: ast.AST) -> Any:
        """The class, function or module, or None."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        owner = meant(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType | type) else None  # type: ignore[attr-defined]

    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(owner := meant(node.value), ModuleType | type):
            wrong += [] if hasattr(owner, node.attr) else [ast.unparse(node)]
        if isinstance(node, ast.Call) and callable(function := meant(node.func)):
            names = {keyword.arg: None for keyword in node.keywords}
            if None not in names and not any(isinstance(each, ast.Starred) for each in node.args):
                try:
                    inspect.signature(function).bind(*node.args, **names)
                except TypeError as error:
                    wrong.append(f"{ast.unparse(node.func)}: {error}")
    return wrong


@pytest.mark.parametrize(
    "source",
    # the training of adapters imports torch's compiler
    [pytest.param(each, marks=[pytest.mark.slow] * (each.stem == "22_adapters"), id=each.stem) for each in SOURCES],
)
def test_what_a_notebook_names_of_the_project_is_there(source: Path) -> None:
    assert not wrong_names("\n".join(cell.source for cell in read_source(source).cells if cell.cell_type == "code"))


def test_a_name_that_is_gone_is_noticed() -> None:
    text = """from stage03_engine.core.scheduler import Scheduler
from stage03_engine.core.scheduler import Planner
import stage03_engine.gone
import lab
def f(build, lab2): return build.anything(Scheduler.schedule, lab.nothing)
lab.claim("x", holds=True)
lab.claim("x", truth=True)
Scheduler.plan
"""
    found = wrong_names(text)
    for part in ("Planner", "stage03_engine.gone", "lab.nothing", "lab.claim: ", "Scheduler.plan"):
        assert len([line for line in found if part in line]) == 1, part
    assert len(found) == 5


@pytest.mark.slow(keep=("02_serve", "04_async_llm", "06_request"))
@EACH
def test_the_notebook_runs_and_its_check_judges(source: Path) -> None:
    """No cell hangs (CELL_SECONDS) or raises: the client then does."""
    notebook = build.read_source(source)
    num_cells, answer = len(notebook.cells), ANSWERS[source.stem]
    notebook.cells += answered(notebook, answer)
    with fork_start.plainly() if source.stem in AS_A_USER else contextlib.nullcontext():
        build.execute(notebook)
    assert UNWRITTEN.fullmatch(said(tagged(nbformat.v4.new_notebook(cells=notebook.cells[:num_cells]), "check")))
    _, right, *after, _, wrong = notebook.cells[num_cells:]
    assert said(right).startswith("PASS: ")
    assert not [text for text in map(said, after) if "once yours passes" in text or "False" in text]
    assert re.search(r"^FAIL .*\n  case .*\n  expected .*\n  yours .*", said(wrong)), answer.mistake
    then = committed(source)
    if is_as_built(then, source):
        saved, now = (
            [said(cell).removeprefix(build.COVER) for cell in tagged_all(one, "today")] for one in (then, notebook)
        )
        assert saved == now, (
            f"what the code has today is another list; run: make notebooks-build ARGS={source.name[:2]}"
        )


def said(cell: nbformat.NotebookNode) -> str:
    """What a cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_a_check_shows_the_smallest_case_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    def spoils(numbers: list[int]) -> int:
        numbers.append(0)
        return len(numbers) if len(numbers) < 4 else -1

    cases = [([1, 2, 3, 4],), ([1, 2, 3],), ([1],)]
    assert not lab.check(spoils, lambda numbers: len(numbers) + 1, iter(cases))
    said = capsys.readouterr().out
    assert "(1 agree)" in said and said.endswith("  case     [1, 2, 3]\n  expected 4\n  yours    -1\n")
    assert cases == [([1, 2, 3, 4],), ([1, 2, 3],), ([1],)]
    assert lab.check(len, len, cases, size=lambda case: len(case[0]))
    assert capsys.readouterr().out == "PASS: the same as the real part on 3 cases.\n"
    lab.check(lambda _: "x" * 5000, lambda _: "", [(0,)])
    assert "x ... (5,002 characters)" in capsys.readouterr().out


def test_a_check_names_what_is_unwritten(capsys: pytest.CaptureFixture[str]) -> None:
    class Part:
        def half(self, x: int) -> int:
            raise NotImplementedError

    def wrong(x: int) -> int:
        raise ValueError("no")

    assert not lab.check(lambda x: Part().half(x), lambda x: x // 2, [(1,)])
    assert re.search(r"NOT YET DONE: .*Part.half is still to be written", capsys.readouterr().out)
    assert not lab.check(wrong, lambda x: x // 2, [(1,)])
    assert "yours    ValueError: no" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="the real part raises in every case"):
        lab.check(wrong, wrong, [(1,), (2,)])


def names(cell: nbformat.NotebookNode, function: str) -> list[str]:
    """The keywords that `lab.FUNCTION(...)` gets in a cell."""
    if cell.cell_type != "code" or f"lab.{function}(" not in cell.source:
        return []
    calls = (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call))
    return [
        str(keyword.arg) for call in calls if ast.unparse(call.func) == f"lab.{function}" for keyword in call.keywords
    ]


@EACH
def test_what_is_predicted_is_hidden_and_compared(source: Path) -> None:
    """A cell for guesses follows each question, then outputs that are hidden; each guess is compared once, and not before."""
    cells = read_source(source).cells
    measured = [(name, place) for place, cell in enumerate(cells) for name in names(cell, "compare")]
    guessed = {name: place for place, cell in enumerate(cells) for name in names(cell, "predict")}
    assert guessed and sorted(guessed) == sorted(name for name, _ in measured)
    assert not [name for name, place in measured if place <= guessed[name]]
    for question, guess, answer in zip(cells, cells[1:], cells[2:]):
        if question.cell_type == "markdown" and "predict" in question.metadata.get("tags", []):
            assert names(guess, "predict") and guess.metadata == {"tags": ["predict"]}
            assert answer.cell_type == "markdown" or answer.metadata.jupyter.outputs_hidden


@EACH
def test_what_is_hidden_does_not_begin_with_the_answer(source: Path, built: nbformat.NotebookNode) -> None:
    """JupyterLab shows the first line of hidden outputs."""
    hidden = [cell for cell in built.cells if cell.metadata.get("jupyter", {}).get("outputs_hidden") and cell.outputs]
    assert hidden
    assert all(cell.outputs[0].text.startswith(build.COVER) for cell in hidden)


def test_guesses_have_names_of_their_own() -> None:
    every = [name for path in SOURCES for cell in read_source(path).cells for name in names(cell, "predict")]
    assert len(every) == len(set(every)), "they are kept by name"


def test_guesses_are_kept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "GUESSES", tmp_path / "guesses.json")
    lab.predict(steps=8, texts=None, least=float("nan"))
    assert "texts: no guess yet; replace None" in capsys.readouterr().out
    lab.predict(steps=None, word=" Later", pair=(1, 2))  # run again without a guess: the one before stays
    capsys.readouterr()
    lab.compare(steps=9, word="later", pair=[1, 2], texts=3, least=float("nan"))
    assert capsys.readouterr().out.splitlines() == [
        "steps: you guessed 8, it is 9",
        "word: you guessed ' Later', and so it is",
        "pair: you guessed [1, 2], and so it is",
        "texts: no guess yet; it is 3",
        "least: you guessed nan, and so it is",
    ]
    for broken in ("{", "[1]", "\xff"):
        lab.GUESSES.write_text(broken, encoding="latin-1")
        lab.compare(steps=9)
        assert capsys.readouterr().out == "steps: no guess yet; it is 9\n"


def test_nobody_has_guessed_when_notebooks_are_built() -> None:
    """Else what the reader guessed would stand in the outputs, and change them."""
    make = nbformat.v4.new_code_cell
    notebook = nbformat.v4.new_notebook(cells=[make("import lab; lab.predict(x=1); print(lab.GUESSES)")])
    for _ in range(2):
        build.execute(notebook)
        path = Path(said(notebook.cells[0]).splitlines()[-1])
        assert not path.exists() and not path.is_relative_to(build.FOLDER)


@EACH
def test_a_notebook_says_what_comes_before_and_how_long_it_takes(source: Path) -> None:
    title, _, line, *_ = read_source(source).cells[0].source.splitlines()
    found = re.fullmatch(r"\*Before: (.+) · about (\d+) minutes with the exercise\*", line)
    assert found, line
    before = re.findall(r"\[(\d\d)\]", found[1])
    assert all(number < title[2:4] for number in before) and (before or found[1] == "nothing")
    row = next(
        row for row in (build.FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if source.stem in row
    )
    assert row.endswith(f"| {', '.join(before) or '–'} | {found[2]} |")


def test_the_glossary_is_made_from_its_source() -> None:
    assert glossary.PAGE.read_text(encoding="utf-8") == glossary.page(), "run: make notebooks-build"
    assert not broken_links(glossary.page(), build.FOLDER)
    for term in glossary.read():
        assert not set('"|\n<>`') & set(term.says) and term.says.endswith("."), term.name
    headings = re.findall(r"^## (.+)$", glossary.page(), re.M)
    assert sorted(headings, key=str.lower) == headings and len(headings) >= 40


def test_each_word_of_the_glossary_is_linked_where_it_is_used_first() -> None:
    anchors = [
        re.findall(r"\]\(GLOSSARY\.md#(\S+) ", "\n".join(cell.source for cell in read_source(path).cells))
        for path in SOURCES
    ]
    assert all(len(found) == len(set(found)) for found in anchors)
    assert set().union(*anchors) <= {term.anchor for term in glossary.read()}


def test_words_are_linked_in_plain_text_only() -> None:
    linker = glossary.Linker()
    untouched = "# A step\n`step` [a step](x) <i title='step'>\n| step |\n```\nstep\n```\nstepwise two-step"
    assert linker.cell(untouched) == untouched
    first, second = linker.cell("**Steps** + a block table, a block").split(" + ")
    assert first.startswith("**[Steps](GLOSSARY.md#step ") and first.endswith('")**')
    assert second.startswith("a [block table](GLOSSARY.md#block-table ") and "a [block](GLOSSARY.md#block " in second
    assert linker.cell("step, Steps, blocks") == "step, Steps, blocks", "once in a notebook"
    assert "[" not in linker.cell("itl") and "[ITL]" in linker.cell("ITL"), "an abbreviation is written in capitals"


@EACH
def test_each_picture_has_an_alternative_text(source: Path, built: nbformat.NotebookNode) -> None:
    outputs = [output for cell in built.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert all(output.metadata["image/png"]["alt"].strip() for output in pictures)
    assert not [text for output in pictures if "Figure" in (text := output.metadata["image/png"]["alt"])]


def test_the_alternative_text_is_what_the_axes_and_the_table_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython import display
    from matplotlib import pyplot

    shown: list[Any] = []
    monkeypatch.setattr(display, "display", shown.append)
    figure, axes = pyplot.subplots()
    axes.plot([1, 2], [3, 4], label="decodes")
    axes.set(xlabel="step", ylabel="ms", title="Waits")
    lab.picture(figure, "A caption.", table="r0 1\nr1 2")
    image, caption, table = shown
    assert image._repr_mimebundle_()[1]["image/png"]["alt"] == "Waits. ms over step. decodes. A caption. r0 1\nr1 2"
    assert caption.data == "*A caption.*" and "<summary>" in table.data and "r1 2" in table.data
    assert not pyplot.get_fignums(), "else it is shown twice"
