"""Make the notebooks: execute each source (jupytext `py:percent`) and write the .ipynb beside it, with its outputs.

`python notebooks/build.py` makes all, `python notebooks/build.py 00 05` makes some. `make notebooks-build` runs this. The pages of
the glossary and of the questions, and the lines of the map's links, are made each time; `python notebooks/build.py MAP` makes nothing else. With `--slides` nothing is
executed: slides are made of what has been built (`make slides`).

A source begins with a markdown cell whose first line is the title; the set-up cell is added after it. A notebook in which a claim does
not hold is not written. What may change from run to run, beyond what the cells print, is left out: cell ids count up, there are
no times of execution, metadata is sorted, and paths of the machine become neutral.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import glossary
import jupytext
import map_lines
import nbformat
import questions
import slides
from lab import NOT_HERE
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
CELL_SECONDS = 300  # nothing but a hang takes so long, however busy the machine is
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
COVER = "(hidden: guess first)\n"
SETUP = """\
# The notebooks run in the environment that `make notebooks` makes. Where that is missing, this cell says so; else it does nothing.
import importlib.util

if importlib.util.find_spec("stagetrace") is None:
    raise ModuleNotFoundError(
        "this Python does not have the project; in the project's folder, run `make notebooks`, "
        "or `pip install --constraint constraints.txt --editable '.[notebooks]'` in an environment of your own"
    )"""


class NotHereError(Exception):
    """What was measured did not hold in this run."""


def sources() -> list[Path]:
    """The notebooks' sources, in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def read_source(path: Path) -> NotebookNode:
    """The notebook that a source describes, not executed. Raises ValueError when it does not begin with a title."""
    notebook = jupytext.read(path, fmt="py:percent")
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        raise ValueError(f"{path.name} must begin with a markdown cell whose first line is `# Title`")
    notebook.cells.insert(1, nbformat.v4.new_code_cell(SETUP))
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    hide_answers(notebook)
    link_terms(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def hide_answers(notebook: NotebookNode) -> None:
    """Between a prediction and the next text, JupyterLab shows outputs only when the reader opens them or runs the cells."""
    hidden = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            hidden = "predict" in cell.metadata.get("tags", [])
        elif hidden and "predict" not in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = {"outputs_hidden": True}


def link_terms(notebook: NotebookNode) -> None:
    """The first use of each word of the glossary becomes a link to it."""
    linker = glossary.Linker()
    for cell in notebook.cells[1:]:
        if cell.cell_type == "markdown":
            cell.source = linker.cell(cell.source)


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run all cells in a fresh kernel of this Python. Raises CellExecutionError, CellTimeoutError after CELL_SECONDS."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), str(FOLDER.parent / "trace")])
    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources=resources, record_timing=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOTEBOOK_GUESSES"] = os.path.join(folder, "guesses.json")  # nobody has guessed yet
        os.environ["NOTEBOOK_WORK"] = folder  # nor passed an exercise
        return client.execute()


def write(notebook: NotebookNode, path: Path, anyway: bool = False) -> None:
    """Write an executed notebook so that the same outputs make the same file.

    Raises NotHereError if a measured claim did not hold; `anyway` only warns.
    """
    said = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    if missed := [line for line in "".join(said).splitlines() if line.startswith(NOT_HERE)]:
        if not anyway:
            raise NotHereError("\n".join([f"{path.name}: build it again when the machine is idle", *missed]))
        print(
            f"{path.name} is written, but build it again when the machine is idle", *missed, sep="\n", file=sys.stderr
        )
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined([*_cover(cell), *cell.outputs])
    text = _neutral(nbformat.writes(notebook, version=4, indent=1, sort_keys=True))
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _cover(cell: NotebookNode) -> list[NotebookNode]:
    """JupyterLab shows the first line of what is hidden, so that line must not be the answer."""
    hidden = cell.outputs and cell.metadata.get("jupyter", {}).get("outputs_hidden")
    return [nbformat.v4.new_output("stream", name="stdout", text=COVER)] if hidden else []


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream that follow each other are one: how a kernel cuts them is chance."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _neutral(text: str) -> str:
    """Paths of this machine say nothing to a reader."""
    paths = [(tempfile.gettempdir(), "/tmp"), (sys.prefix, "/venv"), (str(FOLDER.parent), "/vllm-in-stages")]
    for path, name in sorted(paths, key=lambda pair: -len(pair[0])):
        text = text.replace(f"{path}/", f"{name}/")
    return text


def build(path: Path, tries: int = 3) -> None:
    """Execute and write one. A measured claim may fail because of what else the machine does, so it is tried again; the last try is
    written as it is, with a warning. (The tests refuse such a notebook.)"""
    for left in reversed(range(tries)):
        notebook = execute(read_source(path))
        try:
            return write(notebook, path.with_suffix(".ipynb"), anyway=left == 0)
        except NotHereError as error:
            print(error, file=sys.stderr)


def main() -> None:
    """Build the notebooks whose names begin with one of the arguments, or all."""
    parser = argparse.ArgumentParser(description="Execute the notebooks' sources and write the .ipynb files.")
    parser.add_argument("names", nargs="*", metavar="NN", help="beginnings of names; all if not given")
    parser.add_argument(
        "--slides", action="store_true", help="make slides/NN_name.html of the built notebooks, and execute nothing"
    )
    given = parser.parse_args()
    names = given.names
    if given.slides:
        for path in sources():
            if not names or path.name.startswith(tuple(names)):
                print(os.path.relpath(slides.write(path)))
        return
    glossary.PAGE.write_text(glossary.page(), encoding="utf-8")
    questions.PAGE.write_text(questions.page(), encoding="utf-8")
    map_lines.write()
    os.environ["PYTHONHASHSEED"] = "0"  # the same outputs each time
    for path in sources():
        if not names or path.name.startswith(tuple(names)):
            start = time.perf_counter()
            build(path)
            print(
                f"{path.stem}: {time.perf_counter() - start:.1f} s, {path.with_suffix('.ipynb').stat().st_size // 1000} kB"
            )


if __name__ == "__main__":
    main()
