"""What is drawn: the boxes equal the data, colours are distinguishable, and odd or large recordings are drawn too."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from invented_run import ENGINE, invent
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from stagetrace import Recording, Story, figures, tell
from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.figures import blocks, breakdown, budget, timeline
from stagetrace.figures.style import KINDS, Look, request_look, spread

RECORDED = Path(__file__).parent.parent.parent / "trace" / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir())
# a figure shows one: test_several_processes.py has the others
ONE_ENGINE = [name for name in RUNS if not name.startswith(("dp2", "nodes2"))]
NAMES = ["request_timeline", "process_lanes", "block_map", "token_budget", "latency_breakdown"]


def recorded(name: str) -> Story:
    return tell(Recording(RECORDED / name))


def drawn(figure: Figure) -> list[tuple[str, float, float, float, float]]:
    """(colour, left, bottom, width, height) of every box, rounded."""
    found = []
    for collection in figure.axes[0].collections:
        if isinstance(collection, PolyCollection):
            colour = to_hex(collection.get_facecolor()[0])  # type: ignore[index]
            for path in collection.get_paths():
                (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)  # type: ignore[attr-defined]
                found.append((colour, *(round(float(x), 3) for x in (left, bottom, right - left, top - bottom))))
    return found


@pytest.mark.parametrize("name", ["mixed", "preemption", "prefix_hits"])
def test_the_drawn_block_map_is_the_map(name: str) -> None:
    story = recorded(name)
    painted: dict[tuple[int, int], str] = {}
    for colour, left, bottom, width, height in drawn(figures.block_map(story)):
        for column in range(round(left + 0.5), round(left + 0.5 + width)):
            for block in range(round(bottom + 0.5), round(bottom + 0.5 + height)):
                assert (column, block) not in painted
                painted[column, block] = colour
    order = list(dict.fromkeys(change.req for change in story.blocks if change.req is not None))
    expected = {}
    for stretch in blocks.stretches(story):
        look = request_look(order.index(stretch.holders[0])) if stretch.holders else blocks.CACHED
        for column in range(stretch.first, stretch.last + 1):
            expected[column, stretch.block] = blocks.SHARED.face if len(stretch.holders) > 1 else look.face
    assert painted == expected


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_the_drawn_timeline_is_the_data(name: str) -> None:
    story = recorded(name)
    cells = {}
    for colour, left, bottom, width, height in drawn(figures.request_timeline(story)):
        for column in range(round(left + 0.5), round(left + 0.5 + width)):
            cells[round(bottom + height / 2), column] = colour
    expected = {}
    for y, request in enumerate(timeline.in_engine(story)):
        for stretch in timeline.stretches(story, request):
            expected |= {(y, column): KINDS[stretch.kind].face for column in range(stretch.first, stretch.last + 1)}
    assert cells == expected


@pytest.mark.parametrize("name", ONE_ENGINE)
def test_the_drawn_budget_is_the_tokens(name: str) -> None:
    story = recorded(name)
    heights: dict[tuple[int, str], float] = {}
    for colour, left, _, width, height in drawn(figures.token_budget(story)):
        key = round(left + width / 2), colour
        heights[key] = heights.get(key, 0) + height
    expected: dict[tuple[int, str], float] = {}
    for column, step in enumerate(budget.shares(story)):
        for share in step:
            key = column, KINDS[share.kind].face
            expected[key] = expected.get(key, 0) + share.num_tokens
    assert heights == pytest.approx(expected)


def test_many_steps_are_drawn_as_their_means() -> None:
    story = tell(invent(3, 1000, 60).events)
    figure = figures.token_budget(story)
    area = sum(width * height for _, _, _, width, height in drawn(figure))
    assert area == pytest.approx(sum(step.total_tokens for step in story.steps), rel=1e-3)
    assert "each bar: the mean of 3 steps" in figure.get_suptitle()


@pytest.mark.parametrize("name", RUNS)
def test_the_drawn_breakdown_is_the_latency(name: str) -> None:
    story = recorded(name)
    boxes_ = drawn(figures.latency_breakdown(story))
    for y, latency in enumerate(breakdown.answered(story)):
        row = sorted((left, width) for _, left, bottom, width, height in boxes_ if round(bottom + height / 2) == y)
        assert [width for _, width in row] == pytest.approx(
            [time / 1e6 for _, time in breakdown.pieces(latency)], abs=2e-3
        )
        assert row[0][0] == 0
        assert all(
            left == pytest.approx(before + width, abs=3e-3) for (before, width), (left, _) in itertools.pairwise(row)
        )


def test_arrows_lead_from_the_send_to_the_receipt() -> None:
    story = recorded("one_request")
    axes = figures.process_lanes(story).axes[0]
    zero = story.requests[next(iter(story.requests))].first["http.request"]
    arrows = sorted(
        (a.xyann[0], a.xy[0])
        for a in axes.texts
        if getattr(a, "arrowprops", None) and "|>" in a.arrowprops["arrowstyle"]
    )  # type: ignore[attr-defined]
    expected = sorted(((m.sent_ns - zero) / 1e6, (m.received_ns - zero) / 1e6) for m in story.messages)
    assert arrows == expected


def figures_of(story: Story) -> dict[str, Figure]:
    made = {name: getattr(figures, name)(story) for name in NAMES}
    made["in time"] = figures.request_timeline(story, x="time")
    if story.requests:
        made["one request"] = figures.process_lanes(story, next(iter(story.requests)))
    return made


# Colours as the colour-blind see them. The matrices, for linear RGB, are those of Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "all colours": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "grey print": np.array([[0.2126, 0.7152, 0.0722]] * 3),
}


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as seen."""
    rgb = np.array(to_rgb(colour))
    linear = np.clip(vision @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(np.maximum(xyz / np.array([0.9505, 1.0, 1.089]), 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


GROUPS: dict[str, dict[str, Look]] = {
    "timeline": {kind: KINDS[kind] for kind in timeline.SHOWN},
    "budget": {kind: KINDS[kind] for kind in budget.USES},
    "lanes": {kind: KINDS[kind] for kind in ("engine step", "model")},
    "breakdown": breakdown.LOOKS,
    "blocks": {f"request {i}": request_look(i) for i in range(14)}
    | {"shared": blocks.SHARED, "cached": blocks.CACHED, "free": blocks.FREE},
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("group", GROUPS)
def test_looks_are_told_apart(group: str, vision: str) -> None:
    for (a, first), (b, second) in itertools.combinations(GROUPS[group].items(), 2):
        apart = float(np.linalg.norm(lab(first.face, VISION[vision]) - lab(second.face, VISION[vision])))
        assert apart > 10 or first.hatch != second.hatch, f"{a} and {b} look alike: {apart:.1f}"


@pytest.mark.parametrize("group", GROUPS)
def test_text_is_readable_on_its_ground(group: str) -> None:
    """A contrast of at least 3 : 1, as WCAG 2 asks of large text and graphics."""
    for name, look in GROUPS[group].items():
        light = sorted(((lab(colour, VISION["all colours"])[0] + 16) / 116) ** 3 for colour in (look.face, look.ink))
        assert (light[1] + 0.05) / (light[0] + 0.05) >= 3, name


def one_event() -> Story:
    return tell([Event(1, 0, 5, ENGINE, "EngineCore_DP0", "i", "engine.hello", 5, "x.py:1")])


@pytest.mark.parametrize("story", [tell([]), one_event()], ids=["empty", "one event"])
def test_recordings_of_nothing_say_so(story: Story) -> None:
    for name in NAMES:
        figure = getattr(figures, name)(story)
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert any("The recording holds no" in text.get_text() for text in figure.texts), name
        assert getattr(figures, f"{name}_table")(story).count("\n") == 0, "a head, and no rows"


@pytest.mark.slow(keep=("5]", "6]"))
@pytest.mark.parametrize("lost", [1, 3, 5, 6, 10])
def test_a_run_that_ends_anywhere_is_drawn(lost: int) -> None:
    """The last events are lost, whatever they were: within a step, before its decision, in a forward pass."""
    run = invent(5, 8, 6)
    story = tell(run.events[:-lost])
    for figure in figures_of(story).values():
        figure.draw_without_rendering()
    complete = len([step for step in story.steps if step.decided_ns])
    for stretch in blocks.stretches(story):
        for column in range(stretch.first, min(stretch.last + 1, complete)):
            assert run.holders[column].get(stretch.block, set()) == set(stretch.holders)


@pytest.mark.slow(keep="3000")
@pytest.mark.parametrize(("steps", "requests", "num_blocks"), [(3000, 200, 300), (450, 300, 118)])
def test_large_recordings_are_drawn_with_few_artists(steps: int, requests: int, num_blocks: int) -> None:
    """What takes the time is the number of artists, and of hatched pieces."""
    story = tell(invent(2, steps, requests, num_blocks).events)
    for name, figure in figures_of(story).items():
        artists = len(figure.findobj())
        assert artists < 2500, (name, artists)
        hatched = [
            c for axes in figure.axes for c in axes.collections if isinstance(c, PolyCollection) and c.get_hatch()
        ]
        assert sum(len(c.get_paths()) for c in hatched) <= 4000, name
        assert figure.get_size_inches()[1] <= 14


def test_labels_are_spread() -> None:
    assert spread([0, 1, 1, 5], 1, 10) == [0, 1, 2, 5]
    assert spread([9, 9, 9], 1, 10) == [8, 9, 10]


def test_names_that_look_like_formulas_are_drawn_as_they_are() -> None:
    run = invent(1, 6, 2)
    events = [Event(*(getattr(e, f) for f in e.__struct_fields__)) for e in run.events]
    for event in events:
        event.req = event.req and event.req.replace("r", "$\\frac$_")
    for figure in figures_of(tell(events)).values():
        assert figure._repr_png_()  # type: ignore[attr-defined]


def test_figures_touch_no_pyplot_and_tables_need_no_matplotlib() -> None:
    code = f"""
import sys
from stagetrace import Recording, figures, tell
story = tell(Recording({str(RECORDED / "one_request")!r}))
tables = [getattr(figures, name + "_table")(story) for name in {NAMES}]
assert all(tables) and "matplotlib" not in sys.modules
assert all(getattr(figures, name)(story)._repr_png_() for name in {NAMES})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for name in NAMES:
        with pytest.raises(TraceError, match="figures need matplotlib: pip install matplotlib"):
            getattr(figures, name)(recorded("one_request"))


def test_the_paper_is_white() -> None:
    """Also in a notebook with a dark theme."""
    for figure in figures_of(recorded("one_request")).values():
        assert to_hex(figure.get_facecolor()) == "#ffffff" and all(
            to_hex(a.get_facecolor()) == "#ffffff" for a in figure.axes
        )


def test_one_process_that_is_front_end_and_engine_has_both_lanes() -> None:
    events = [event for event in invent(1, 6, 2).events if not event.name.startswith("zmq.")]
    for event in events:
        event.pid, event.proc = ENGINE, "LLM"
    labels = figures.process_lanes(tell(events)).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [f"LLM\n{ENGINE}", "LLM\nbusy loop"]
