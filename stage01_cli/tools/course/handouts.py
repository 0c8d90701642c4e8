"""`handout`: a copy of the project for a class, without the answers to the exercises, in which everything that a student does works.

The reference of an exercise is the project's own code, which judges and servers need. So a function that answers an exercise keeps its
signature and docstring in the copy, and loses its text; its byte code lies in `withheld/`, and `withheld.py` puts it in its place.
"""

from __future__ import annotations

import ast
import json
import marshal
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

from stage01_cli.tools.course.answers import CODE, Answer, answers, body_of, functions, span_of
from stage01_cli.tools.course.exercises import ROOT, Exercise, exercises, parsed
from stage01_cli.tools.course.own import FunctionDef, definitions
from stage03_engine.errors import ConfigError

WITHHELD = "  # withheld: "
"""Behind the stub of a function; notebooks/lab.py looks for it."""
STAGES = tuple(f"{name}/__init__.py" for name in CODE if name.startswith("stage"))
AFTERWARDS = {
    "notebooks/ladder/4_paged.py": {4, 5},
    "notebooks/ladder/5_served.py": {4, 5},
    "notebooks/17_a_kernel_in_six_steps.py": {7},
    "notebooks/17_a_kernel_in_six_steps.ipynb": {7},
}
"""Files that build a smaller part of the kind that these exercises ask for: to be read when they are passed."""
BUGS, DIAGNOSED = "notebooks/buggy_schedulers.py", 13
"""Engines that the exercise asks to diagnose: their text and their words are the answer."""
LADDER = "notebooks/ladder/*.py"
"""An exercise that begins with an empty file may take what stands here."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PICTURE = "notebooks/pictures/walk.html"
PLAN = "notebooks/exercises/TEACHING.md"
SOLVED = ("automutants.py", "borrowed.py", "mistakes.py", "pasted.py")
"""What tests/exercises has, beside the tests of judges, to make answers or wrong ones."""


@dataclass
class Handout:
    """What is withheld: functions by their file, and whole files."""

    some: list[Exercise]
    functions: dict[str, dict[str, Exercise]] = field(default_factory=dict)  # file -> name -> the exercise
    kinds: dict[str, str] = field(default_factory=dict)  # file -> how its functions are kept: code or text
    files: dict[str, str] = field(default_factory=dict)  # file -> why it is another one
    lines: dict[str, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ladder = {line.strip() for path in ROOT.glob(LADDER) for line in path.read_text(encoding="utf-8").splitlines()}
        for answer in answers(self.some):
            free = ladder if answer.exercise.alone else set()
            self.lines |= dict.fromkeys([line for line in answer.lines if line not in free], answer)
            where = str(answer.path.relative_to(ROOT))
            name = _real_name(answer)
            self.functions.setdefault(where, {}).setdefault(name, answer.exercise)


def _real_name(answer: Answer) -> str:
    """A class of the starter may have a method from another class of the reference."""
    defined = definitions(parsed(answer.path.read_text(encoding="utf-8")))
    method = answer.name.rpartition(".")[2]
    return next(
        (
            f"{part.name}.{method}"
            for part in defined.family(answer.name.rpartition(".")[0])
            if method in _methods(part)
        ),
        answer.name,
    )


def _methods(part: ast.ClassDef) -> list[str]:
    return [each.name for each in part.body if isinstance(each, FunctionDef)]


def write_handout(folder: Path, numbers: Iterable[int] = ()) -> Handout:
    """Write the copy to `folder`. Without numbers the answers to all exercises are withheld. Raises ConfigError for a folder that is not
    empty, a number that is none, a project that is no git checkout, and a text that would give an answer away."""
    known = exercises()
    if unknown := [number for number in numbers if number not in known]:
        raise ConfigError(f"--exercises: there is no exercise {unknown[0]}; `stages course list` shows all")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; name a folder that is new or empty")
    names = [name for name in tracked() if copied(name)]
    handout = Handout([known[number] for number in sorted(set(numbers) or set(known))])
    try:
        _write(handout, folder, names)
    except BaseException:  # half a copy is none, and would stand in the way of the next
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return handout


def _write(handout: Handout, folder: Path, names: list[str]) -> None:
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        content = (ROOT / name).read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # pictures and weights
            target.write_bytes(content)
            continue
        target.write_text(_without_answers(handout, folder, name, text), encoding="utf-8", newline="")
        shutil.copymode(ROOT / name, target)
    (folder / "trace" / "stagetrace" / "withheld.py").write_bytes(Path(__file__).with_name("withheld.py").read_bytes())
    made = {"python": "{}.{}".format(*sys.version_info), "magic": MAGIC_NUMBER.hex(), "files": handout.kinds}
    (folder / "withheld" / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    (folder / "HANDOUT.md").write_text(_page(handout), encoding="utf-8")


def tracked() -> list[str]:
    """The project's files, as git knows them. Raises ConfigError where it does not."""
    try:
        said = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        said = None
    names = [name for name in said.stdout.decode().split("\0") if (ROOT / name).is_file()] if said else []
    if "pyproject.toml" not in names:
        raise ConfigError(f"a handout is made of the files that git tracks, and {ROOT} is not a git checkout")
    return names


def copied(name: str) -> bool:
    """Does the copy have this file? Of the tests only the judges, and what they need; no wrong solutions."""
    path = Path(name)
    if "mutants" in path.parts:
        return False
    if path.parts[0] != "tests" or path.suffix == ".md":
        return True
    if path.parts[1] == "exercises":
        judges = {each.judge.name for each in exercises().values()}
        return (
            len(path.parts) == 3
            and (path.name in judges or not path.name.startswith("test_"))
            and path.name not in SOLVED
        )
    return path.parts[1] == "support" or (len(path.parts) == 2 and not path.name.startswith("test_"))


def _without_answers(handout: Handout, folder: Path, name: str, text: str) -> str:
    """The text of a file as the copy has it."""
    if numbers := AFTERWARDS.get(name, set()) & {each.number for each in handout.some}:
        handout.files[name] = why = f"it builds a small part of the kind that exercise {min(numbers)} asks for"
        return _only_beginning(name, text, f"{name} is withheld in this handout: {why}")
    if name == PICTURE:
        handout.files[name] = "it shows the project's code"
        return f"<!doctype html>\n<title>Withheld</title>\n<p>{WALK}</p>\n"
    if name == PLAN:
        handout.files[name] = "its last chapter lists wrong solutions"
        return text.partition("## Mistakes to expect")[0].rstrip("\n") + "\n"
    if name.endswith(".py"):
        text = _stubbed(handout, folder, name, _without_words(handout, name, text))
    elif name.endswith(".ipynb"):
        text = _without_outputs(handout, text)
    if name in STAGES:
        text = f"{text}import stagetrace.withheld  # the answers to the exercises, whose text this copy does not have\n\nstagetrace.withheld.install()\n"
    if name == "README.md":
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n*This copy is a handout: [what it withholds](HANDOUT.md).*\n{rest}"
    if found := [line for line in _code_lines(name, text) if line in handout.lines]:
        answer = handout.lines[found[0]]
        raise ConfigError(f"{name} would give exercise {answer.exercise.number} away: {found[0]}")
    return text


WALK = "This page shows the project's code, so a handout does not have it. <code>stages walk 'To be, or' --html walk.html</code> makes one."


def _code_lines(name: str, text: str) -> Iterator[str]:
    """The lines of a text file; of a notebook, the lines of its cells and what they printed."""
    if not name.endswith(".ipynb"):
        yield from (line.strip() for line in text.splitlines())
        return
    for cell in json.loads(text)["cells"]:
        yield from (line.strip() for line in cell["source"])
        yield from (line.strip() for output in cell.get("outputs", []) for line in output.get("text", []))


def _without_outputs(handout: Handout, text: str) -> str:
    """A notebook, in which a sentence stands for what gives an answer away."""
    notebook, changed = json.loads(text), False
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if any(line.strip() in handout.lines for line in output.get("text", [])):
                output["text"], changed = ["(withheld in this handout)\n"], True
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n" if changed else text


def _only_beginning(name: str, text: str, said: str) -> str:
    """The first thing that a file says, its docstring or its first cell, and then that there is no more."""
    if name.endswith(".ipynb"):
        notebook = json.loads(text)
        title = notebook["cells"][0]
        notebook["cells"] = [title, title | {"id": "withheld", "source": [said]}]
        return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if "\n# %%" in text:
        return "# %%".join(text.split("# %%", 2)[:2]) + f"# %% [markdown]\n# {said}\n"
    lines = text.splitlines()[: parsed(text).body[0].end_lineno]
    return "\n".join([*lines, "", f'raise SystemExit("{said}")', ""])


def _stubbed(handout: Handout, folder: Path, name: str, text: str) -> str:
    """The source with stubs, as long as it was; what they stand for goes to `withheld/`."""
    if name.startswith(CODE) and name not in handout.functions:
        return text
    lines, tree = text.splitlines(keepends=True), parsed(text)
    withheld = {
        each: (full, exercise)
        for full, each in _named(tree)
        if (exercise := _answered(handout, name, full, each, text)) is not None and span_of(each) is not None
    }
    if not withheld:
        return text
    kind = handout.kinds[name] = "text" if any(_is_kernel(each) for each in withheld) else "code"
    codes = {
        (code.co_firstlineno, code.co_name): code for code in _all_code(compile(text, name, "exec", dont_inherit=True))
    }
    kept: dict[str, CodeType | list[str]] = {}
    for each, (full, exercise) in withheld.items():
        handout.functions.setdefault(name, {})[full] = exercise
        first, last = span_of(each) or (0, 0)
        code = codes[min([each.lineno, *(one.lineno for one in each.decorator_list)]), each.name]
        kept[full] = lines[first:last] if kind == "text" else code
        # a method that asks super() has the class in a cell, and so must its stub
        error = "NotImplementedError(__class__)" if code.co_freevars else "NotImplementedError"
        stub = f"{' ' * (each.col_offset + 4)}raise {error}{WITHHELD}it answers exercise {exercise.number}\n"
        lines[first:last] = [stub, *["\n"] * (last - first - 1)]
    target = folder / "withheld" / f"{name}.{kind}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(zlib.compress(json.dumps(kept).encode()) if kind == "text" else marshal.dumps(kept))
    return "".join(lines)


def _without_words(handout: Handout, name: str, text: str) -> str:
    """A solution of an exercise's own, or an engine with a bug, without the docstrings that the starter does not have."""
    here = [each for each in handout.some if ROOT / name == each.own_reference]
    if not here and not (name == BUGS and DIAGNOSED in {each.number for each in handout.some}):
        return text
    known = _docstrings(parsed(here[0].starter.read_text(encoding="utf-8"))) if here else {}
    lines = text.splitlines(keepends=True)
    for said, node in _docstrings(parsed(text)).items():
        if said not in known:
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            lines[first:last] = [f'{" " * node.col_offset}"""Withheld."""\n', *["\n"] * (last - first - 1)]
    return "".join(lines)


def _docstrings(tree: ast.Module) -> dict[str, ast.stmt]:
    """Each docstring, and where it stands."""
    documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return {said: node.body[0] for node in documented if (said := ast.get_docstring(node))}


def _named(tree: ast.Module) -> Iterator[tuple[str, FunctionDef]]:
    owners = {id(each): part.name for part in tree.body if isinstance(part, ast.ClassDef) for each in part.body}
    for each in functions(tree):
        owner = owners.get(id(each), "")
        yield f"{owner}.{each.name}" if owner else each.name, each


def _answered(handout: Handout, name: str, full: str, function: FunctionDef, text: str) -> Exercise | None:
    """The exercise that a function answers; also one that repeats an answer, such as an engine with a planted bug."""
    if (exercise := handout.functions.get(name, {}).get(full)) is not None:
        return exercise
    if name.startswith(CODE):
        return None
    if name == BUGS:
        return next((each for each in handout.some if each.number == DIAGNOSED), None)
    found = [handout.lines[line] for line in body_of(function, text.splitlines()) if line in handout.lines]
    return found[0].exercise if found else None


def _is_kernel(function: FunctionDef) -> bool:
    return any("triton" in ast.unparse(each) for each in function.decorator_list)


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all_code(each)


def _page(handout: Handout) -> str:
    """HANDOUT.md."""
    rows = [
        f"| {exercise.number} | {exercise.title} | `{name}` | {', '.join(f'`{each}`' for each, whose in found.items() if whose == exercise)} |"
        for exercise in handout.some
        for name, found in sorted(handout.functions.items())
        if exercise in found.values()
    ]
    return HEAD.format("{}.{}".format(*sys.version_info)) + "\n".join(
        [
            "", "| exercise | | file | withheld |", "|---|---|---|---|", *rows, "",
            "| file | why it is not what it was |", "|---|---|",
            *(f"| `{name}` | {why} |" for name, why in handout.files.items()),
            "| `notebooks/exercises/*/mutants`, most of `tests` | wrong solutions, right ones, and tests that hold some |", "",
        ]
    )  # fmt: skip


HEAD = """# Handout

A copy of the project for those who rebuild it, written by `stages course handout`. It runs as the original does: the server, `stages course`, the
notebooks. The functions that an exercise asks you to write have their signature and what they promise, and instead of their text a line
that says so. Their byte code lies in `withheld/`, since judges compare with it and the server runs on it. So this copy needs **Python {}**;
another version ends with a line that says which.

Byte code is out of sight, not out of reach: it can be taken apart. You would only miss the point. What stands around the withheld functions
is the text that runs; change it as you like.
"""
