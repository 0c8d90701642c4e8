"""The figures of all recorded runs, and of a crowded one: nothing is cut off, no labels cover each other, no warning comes."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
from invented_run import invent
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

from stagetrace import Recording, Story, figures, tell

RECORDED = Path(__file__).parent.parent.parent / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir())
NAMES = ["request_timeline", "process_lanes", "block_map", "token_budget", "latency_breakdown"]


def figures_of(story: Story) -> dict[str, Figure]:
    made = {name: getattr(figures, name)(story) for name in NAMES}
    made["in time"] = figures.request_timeline(story, x="time")
    if story.requests:
        made["one request"] = figures.process_lanes(story, next(iter(story.requests)))
    return made


def visible_labels(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_visible()]
    return [tick.label1 for tick in ticks if tick.label1.get_text()]


@pytest.mark.slow(keep=("crowd", "one_request"))
@pytest.mark.parametrize("name", [*RUNS, "crowd"])
def test_nothing_is_cut_and_no_labels_cover_each_other(name: str) -> None:
    story = tell(invent(1, 80, 40, 60).events) if name == "crowd" else tell(Recording(RECORDED / name))
    for kind, figure in figures_of(story).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure.draw_without_rendering()
        paper = figure.bbox
        texts = [figure._suptitle, *figure.texts, *(t for legend in figure.legends for t in legend.get_texts())]  # type: ignore[attr-defined]
        ticks = []
        for axes in figure.axes:
            if axes.axison:
                ticks += [visible_labels(axis) for axis in (axes.xaxis, axes.yaxis)]
                texts += [axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for text in [*texts, *itertools.chain(*ticks)]:
            if text is not None and text.get_text():
                box = text.get_window_extent()
                inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= paper.x1 + 1 and box.y1 <= paper.y1 + 1
                assert inside, f"{kind}: {text.get_text()!r} is cut"
                assert text.get_fontsize() >= 4, f"{kind}: {text.get_text()!r} is too small"
        if kind in ("block_map", "token_budget"):
            assert all("." not in label.get_text() for label in itertools.chain(*ticks)), (
                f"{kind}: fractions of what is counted"
            )
        for labels in ticks:
            for a, b in itertools.combinations([label.get_window_extent() for label in labels], 2):
                assert not a.overlaps(b), f"{kind}: tick labels cover each other"


def test_of_many_rows_only_some_are_named() -> None:
    figure = figures.request_timeline(tell(invent(1, 150, 150, 60).events))
    figure.draw_without_rendering()
    labels = [label.get_window_extent() for label in visible_labels(figure.axes[0].yaxis)]
    assert len(labels) > 10
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(labels))
