"""What the notebooks share: a server to ask, a recording of what happened here, tables, captions, claims, and the check of an exercise."""

from __future__ import annotations

import atexit
import copy
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stage01_cli.tools.course import table as progress
from stage01_cli.tools.course.exercises import Exercise, find
from stage01_cli.tools.course.own import answered_by
from stagetrace import Story, figures, trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "trace" / "recorded"
GPT2_TOKENS = {
    0: "!", 30: "?", 257: " a", 345: " you", 389: " are", 640: " time", 995: " world", 1264: "201", 1374: " How", 2402: " upon",
    5773: "asts", 7454: "Once", 15496: "Hello",
}  # fmt: skip
"""An excerpt of GPT-2's vocabulary (vocab.json), for what is said of it: the bundled model has a vocabulary of its own."""
GUESSES = Path(os.environ.get("NOTEBOOK_GUESSES", Path(__file__).resolve().with_name(".guesses.json")))
"""What the reader predicted, by name: it outlives the kernel, and git ignores it. The build and the tests have one of their own."""
WORK = Path(os.environ.get("NOTEBOOK_WORK", ROOT / "work"))
"""Where `stages course` keeps what the reader has passed. For the build and the tests nobody has passed anything."""
WITHHELD = "  # withheld: "
"""Stands in a handout (`stages course handout`) where the answer to an exercise would."""
NOT_HERE = "does not hold in this run"
PATIENCE = 250  # seconds to wait for a server: only one that hangs takes so long
warnings.filterwarnings("ignore", message="IProgress not found")  # of a progress bar that nothing here shows


def new_folder() -> Path:
    """An empty folder for a recording; it is removed when the notebook's kernel ends."""
    parent = tempfile.mkdtemp(prefix="stages-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = Path(parent) / "recording"
    folder.mkdir()
    return folder


class Server:
    """`stages serve gpt2-tiny` in a process of its own, on a free port, recording to `folder`."""

    def __init__(self, *flags: str, model: str = "gpt2-tiny") -> None:
        self.folder = new_folder()
        command = [sys.executable, "-m", "stage01_cli", "serve", model, "--host", "127.0.0.1", "--port", "0"]
        command += ["--num-gpu-blocks-override", "64", "--trace", str(self.folder), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)
        self.log: list[str] = []
        self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if " on http://" in line:
                threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True).start()
                return line.split(" on ")[-1].strip()
        raise RuntimeError("the server did not start:\n" + "\n".join(self.log))

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a GET, or of a POST of `body`."""
        with self._open(path, body, headers) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text else ""

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> Iterator[str]:
        """The lines of a streamed answer, as they come, without the empty ones."""
        with self._open(path, body | {"stream": True}, headers) as answer:
            for line in answer:
                if line.strip():
                    yield line.decode().rstrip()

    def watch(self, path: str) -> Iterator[Any]:
        """What a GET streams as server-sent events, decoded, as it comes."""
        with self._open(path, None, {}) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def _open(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        data = None if body is None else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **names})
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE)
        except urllib.error.HTTPError as error:  # a refusal is an answer too
            return error

    def close(self) -> None:
        """SIGTERM, as an operator would; the recording is complete afterwards."""
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)


@contextmanager
def serve(*flags: str) -> Iterator[Server]:
    """A server for the length of a `with` block."""
    server = Server(*flags)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def record(proc: str = "notebook") -> Iterator[Path]:
    """Record what the stages do in this very process, for the length of a `with` block; gives the folder."""
    folder = new_folder()
    trace.hold(proc)
    trace.open(str(folder))
    try:
        yield folder
    finally:
        trace.close()


def table(rows: Iterable[Sequence[Any]], *header: str) -> None:
    """Print rows as aligned text; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]
    for line in lines:
        parts = [value.rjust(w) if r else value.ljust(w) for value, w, r in zip(line, widths, right)]
        print("  ".join(parts).rstrip())


def _cell(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    return text.lstrip("-−").replace(",", "").replace(".", "", 1).isdigit()


def draw(make: Callable[..., Figure], story: Story, caption: str = "", dpi: int = 80, **given: Any) -> None:
    """Show one of stagetrace's figures of a recording, and its table."""
    table_of = getattr(figures, f"{make.__name__}_table")
    known = {name: value for name, value in given.items() if name in inspect.signature(table_of).parameters}
    picture(make(story, **given), caption, dpi, table_of(story, **known))


def picture(figure: Figure, caption: str = "", dpi: int = 80, table: str = "") -> None:
    """Show a figure, small enough for a notebook, a sentence below it, and the table that says the same. For those who cannot see it,
    the picture's alternative text is what its axes say, and the beginning of the table."""
    from IPython.display import Image, Markdown, display
    from matplotlib import pyplot

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi, bbox_inches="tight")
    pyplot.close(figure)  # else it is shown once more at the end of the cell
    alt = ". ".join(filter(None, [*_labels(figure), caption.rstrip("."), table]))
    display(Image(data.getvalue(), alt=_shortened(alt, 500)))
    if caption:
        display(Markdown(f"*{caption}*"))
    if table:
        text = f"<details><summary>The same as text</summary>\n\n```text\n{_shortened(table, 4000)}\n```\n\n</details>"
        display(Markdown(text))


def _labels(figure: Figure) -> Iterator[str]:
    """What is written at a figure's axes: titles, what is drawn against what, and the names of what is in it."""
    yield figure.get_suptitle()
    for axes in figure.axes:
        yield axes.get_title()
        if axes.get_xlabel() or axes.get_ylabel():
            yield f"{axes.get_ylabel() or 'rows'} over {axes.get_xlabel() or 'columns'}"
        rows = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
        yield ", ".join(rows if any(row and not _is_number(row) for row in rows) else [])
        yield ", ".join(axes.get_legend_handles_labels()[1])


def source(thing: Any, first: int | None = None, last: int | None = None, spoil: bool = False) -> None:
    """Print the real code of a class or function (or some of its lines, counted from 1), and where it stands: by name, since lines move.
    What an exercise of the course asks the reader to write is shown when that is passed, or with `spoil`; until then a sentence says so."""
    lines, _ = inspect.getsourcelines(thing)
    if withheld := [line.partition(WITHHELD)[2].strip() for line in lines if WITHHELD in line]:
        print(f"# {thing.__qualname__} is withheld: {withheld[0]}")
        return
    for exercise in _answers(thing):
        if not _may_see(exercise, spoil):
            print(f"# {thing.__qualname__}: {_when(exercise)}")
            return
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    some = "" if first is None else f", its lines {first} to {last or len(lines)}"
    print(f"# {where}: {thing.__qualname__}{some}")
    print("".join(lines[(first or 1) - 1 : last]).rstrip())


def say(sentence: str) -> None:
    """Print a sentence with numbers of this run. What was measured is said by the cell that measured it, never by a text beside it:
    on the reader's machine, and at the next build, the text would be wrong."""
    print(textwrap.fill(sentence, 120))


def shown(number: int, spoil: bool = False) -> bool:
    """May a cell show what answers this exercise of the course? When it is passed, or with `spoil`; else a sentence says so."""
    exercise = find(number)
    if not (may := _may_see(exercise, spoil)):
        print(f"# This {_when(exercise)}")
    return may


def _answers(thing: Any) -> Iterator[Exercise]:
    """The exercises that a function answers, or a method of a class, also one that stands for another part's."""
    names = [(thing.__module__, thing.__qualname__)]
    if isinstance(thing, type):
        names = [(each.__module__, f"{each.__qualname__}.{method}") for each in thing.__mro__ for method in vars(thing)]
    yield from filter(None, (answered_by(*each) for each in names))


def _may_see(exercise: Exercise, spoil: bool) -> bool:
    return spoil or bool(progress.read(WORK).get(exercise.name, progress.Done()).passed)


def _when(exercise: Exercise) -> str:
    number, title = exercise.number, exercise.title.lower()
    return f"answers exercise {number}, {title}. It is shown here when you have passed that, or with spoil=True."


def claim(sentence: str, holds: bool, measured: bool = False) -> None:
    """Print a sentence about the run above, after looking whether it holds. Raises AssertionError if it does not.

    What was `measured` in time may fail on a machine that is busy with something else; then the cell says so and goes on.
    """
    if not holds and not measured:
        raise AssertionError(f"{NOT_HERE}: {sentence}")
    print(f"holds: {sentence}" if holds else f"{NOT_HERE} (is the machine busy?): {sentence}")


def predict(**guesses: Any) -> None:
    """Keep the reader's guesses (name=value, None: none yet) in GUESSES, until `compare` has the measured values."""
    kept = _kept_guesses()
    kept |= {name: guess for name, guess in guesses.items() if guess is not None}
    GUESSES.write_text(json.dumps(kept, indent=1, default=str), encoding="utf-8")
    for name in guesses:
        print(
            f"{name}: your guess is {kept[name]!r}"
            if name in kept
            else f"{name}: no guess yet; replace None, and run this cell"
        )


def compare(**measured: Any) -> None:
    """Print what the reader guessed of each name beside what it is."""
    kept = _kept_guesses()
    for name, value in measured.items():
        if name not in kept:
            print(f"{name}: no guess yet; it is {value!r}")
        elif _alike(kept[name], json.loads(json.dumps(value, default=str))):
            print(f"{name}: you guessed {kept[name]!r}, and so it is")
        else:
            print(f"{name}: you guessed {kept[name]!r}, it is {value!r}")


def _kept_guesses() -> dict[str, Any]:
    """All guesses so far. A file that cannot be read counts as none."""
    try:
        kept = json.loads(GUESSES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _alike(guess: Any, value: Any) -> bool:
    if isinstance(guess, str) and isinstance(value, str):
        return guess.strip().casefold() == value.strip().casefold()
    return bool(guess == value) or repr(guess) == repr(value)  # not a number is not equal to itself


def check(
    yours: Callable[..., Any],
    real: Callable[..., Any],
    cases: Iterable[Sequence[Any]],
    size: Callable[[Sequence[Any]], int] = lambda case: len(repr(case)),
) -> bool:
    """Call both with copies of each case (a tuple of arguments), the smallest first, and say whether they agree in what they return
    or raise: NOT YET DONE while `yours` raises NotImplementedError, FAIL with the smallest case in which they differ, or PASS (True)."""
    ordered, num_returned = sorted(cases, key=size), 0
    for number, case in enumerate(ordered):
        expected, got = _outcome(real, case), _outcome(yours, case)
        num_returned += expected.error is None
        if isinstance(got.error, NotImplementedError):
            print(f"NOT YET DONE: {_place(got.error)} is still to be written.")
            return False
        if expected.text != got.text:
            print(f"FAIL on the smallest case that differs from the real part ({number} agree):")
            for name, text in (("case", ", ".join(map(repr, case))), ("expected", expected.text), ("yours", got.text)):
                print(f"  {name:8} {_shortened(text)}")
            return False
    assert num_returned, "the real part raises in every case: the check itself is broken"
    print(f"PASS: the same as the real part on {len(ordered)} cases.")
    return True


class _Outcome(NamedTuple):
    text: str
    error: Exception | None = None


def _outcome(function: Callable[..., Any], case: Sequence[Any]) -> _Outcome:
    try:
        return _Outcome(repr(function(*copy.deepcopy(case))))
    except Exception as error:
        return _Outcome(f"{type(error).__name__}: {error}", error)


def _place(error: Exception) -> str:
    """The function that raised it."""
    return [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)][-1]


def _shortened(text: str, most: int = 1000) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text):,} characters)"
