"""How the figures look: colours that the colour-blind can distinguish, a hatch beside every colour, white paper.

matplotlib is imported where a figure is made, not before: data and tables do not need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stagetrace.errors import TraceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE = "#222222", "#8a8a8a"
WIDTH = 10.0  # inches
MANY = 4000  # more pieces than this are drawn plain: nobody could see their hatches, and they take seconds


@dataclass(frozen=True)
class Look:
    """How one kind of thing is filled. Two looks differ in hatch, or in lightness enough for a grey print."""

    face: str
    hatch: str = ""
    ink: str = INK  # of text on it


# The colours are those of Okabe and Ito ("Color Universal Design", 2008).
KINDS: dict[str, Look] = {
    "wait": Look("#e4e4e4", "..."),
    "prefill": Look("#0072b2", ink="white"),
    "decode": Look("#56b4e9"),
    "preempted": Look("#d55e00", "xxx"),
    "no tokens": Look("#ffffff", "---"),
    "drafts": Look("#f0e442", "\\\\\\"),
    "model": Look("#0072b2", ink="white"),
    "engine step": Look("#e4e4e4"),
}

_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#56b4e9", "#d55e00"]
_HATCHES = [["", "\\\\", "..", "", "//", "", "xx"], ["++", "oo", "--", "xx", "||", "..", "\\\\"]]


def css_colours() -> dict[str, str]:
    """Name of a CSS variable -> colour, of what has a colour of its own on every page: what a request does, and who it is. (Waiting, cached and
    free are greys of the page.)"""
    colours = {kind: KINDS[kind].face for kind in ("prefill", "decode", "preempted")}
    return colours | {f"hue-{place}": colour for place, colour in enumerate(_COLOURS)}


def request_look(place: int) -> Look:
    """The look of the request at a place in the order of arrival; after 14 they repeat, and only names tell requests apart."""
    colour = _COLOURS[place % len(_COLOURS)]
    return Look(
        colour, _HATCHES[place // len(_COLOURS) % 2][place % len(_COLOURS)], "white" if place % 7 in (0, 2, 6) else INK
    )


def new_figure(height: float, rows: list[float] | None = None, title: str = "") -> tuple[Figure, list[Axes]]:
    """An empty figure of the common width, `height` inches, with one axes per entry of `rows` (their shares of the height).

    It belongs to no window and to no pyplot state. The last expression of a notebook's cell shows it. Raises TraceError
    without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TraceError("figures need matplotlib: pip install matplotlib; --table prints the same as text") from error

    class NotebookFigure(Figure):
        """Shows itself in a notebook, whatever backend is active there."""

        def _repr_png_(self) -> bytes:
            import io

            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    figure = NotebookFigure(figsize=(WIDTH, height), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    shares = rows or [1.0]
    axes = figure.subplots(len(shares), 1, sharex=True, squeeze=False, height_ratios=shares)[:, 0].tolist()
    for axis in axes:
        axis.set_facecolor("white")
        axis.tick_params(colors=INK, labelsize=9)
        for spine in axis.spines.values():
            spine.set_color(PALE)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    return figure, axes


def note(figure: Figure, text: str) -> None:
    """Say why there is nothing to see; the figure becomes as small as that."""
    figure.set_size_inches(WIDTH, 1.5)
    for axes in figure.axes:
        axes.set_axis_off()
    figure.text(0.5, 0.45, text, ha="center", va="center", fontsize=10, color=INK)


Box = tuple[float, float, float, float]  # left, bottom, width, height, in data units


def boxes(axes: Axes, places: Iterable[Box], look: Look, plain: bool = False) -> None:
    """Fill rectangles with one look; `plain` leaves hatch and outline out."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in places]
    edge = "white" if look.ink == "white" and not look.hatch else "#444444"  # the hatch has the colour of the edge
    hatched: dict[str, Any] = {"edgecolor": edge, "linewidth": 0.6, "hatch": look.hatch}
    line = {"edgecolor": look.face, "linewidth": 0.3} if plain else hatched
    if corners:
        axes.add_collection(PolyCollection(corners, facecolor=look.face, **line), autolim=False)


Lines = dict[str, tuple[str, str]]  # label -> line style, colour


def legend(
    axes: Axes,
    looks: dict[str, Look],
    marks: dict[str, tuple[str, str]] | None = None,
    lines: Lines | None = None,
    plain: bool = False,
) -> None:
    """Under the axes: a patch per look (`plain`: without its hatch), a symbol per mark (label -> marker, colour), a stroke per line."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(
            facecolor=look.face, hatch="" if plain else look.hatch * 2, edgecolor="#444444", linewidth=0.5, label=label
        )
        for label, look in looks.items()
    ]
    for label, (marker, colour) in (marks or {}).items():
        handles.append(Line2D([], [], marker=marker, color=colour, linestyle="", markeredgecolor=INK, label=label))
    for label, (style, colour) in (lines or {}).items():
        handles.append(Line2D([], [], color=colour, linewidth=1.4, label=label, ls=style))
    if handles:
        figure = axes.get_figure()
        assert figure is not None
        ncols = _fitting_columns([handle.get_label() for handle in handles])
        figure.legend(handles=handles, loc="outside lower left", ncols=ncols, fontsize=9, frameon=False, labelcolor=INK)


def _fitting_columns(labels: list[str]) -> int:
    """How many columns of a legend fit into the width of the figure: matplotlib fills one column after another."""
    for num_columns in range(len(labels), 1, -1):
        short, longer = divmod(len(labels), num_columns)
        starts = [i * short + min(i, longer) for i in range(num_columns + 1)]
        if sum(max(map(len, labels[a:b])) + 9 for a, b in pairwise(starts)) <= 125:
            return num_columns
    return 1


def row_labels(axes: Axes, labels: list[str], inches: float) -> None:
    """Name the rows 0, 1, ... from the top down; every k-th if they are closer together than letters are high."""
    every = max(1, -(-len(labels) * 14 // max(1, int(inches * 100))))
    axes.set_yticks(range(0, len(labels), every), labels[::every])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def step_ticks(axes: Axes, numbers: list[int]) -> None:
    """Columns 0, 1, ... are the steps with these numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def number(x: float, _: int | None = None) -> str:
        column = round(x)
        return str(numbers[column]) if 0 <= column < len(numbers) else ""

    axes.set_xlim(-0.6, max(len(numbers), 1) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(number))
    axes.set_xlabel("engine step", fontsize=9, color=INK)


def write(axes: Axes, x: float, y: float, text: str, size: float, look: Look, ha: str = "center") -> None:
    """Text on something filled; where it has a hatch, on a piece of it without."""
    paper = {"facecolor": look.face, "edgecolor": "none", "pad": 0.5} if look.hatch else None
    # Not in the layout: it lies within the axes anyway, and measuring a thousand of them takes seconds.
    axes.text(x, y, text, fontsize=size, color=look.ink, ha=ha, va="center_baseline", bbox=paper, in_layout=False)


def whole_ticks(axes: Axes, most: int) -> None:
    """The vertical axis counts: no fractions."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=most, integer=True))


def spread(places: list[float], gap: float, end: float) -> list[float]:
    """Where to write labels of sorted `places` so that they are `gap` apart: near their places, not beyond `end` unless they are
    too many."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap) if found else place)
    limit = end
    for i in reversed(range(len(found))):
        found[i] = min(found[i], limit)
        limit = found[i] - gap
    return found
