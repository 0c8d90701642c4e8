"""The token budget of every step: who got how much of it, for what, and which requests were there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagetrace.figures.names import columns, drawn_names, plural, short_names
from stagetrace.figures.style import (
    INK,
    KINDS,
    MANY,
    Box,
    boxes,
    legend,
    new_figure,
    note,
    step_ticks,
    whole_ticks,
    write,
)
from stagetrace.figures.timeline import in_engine, stretches
from stagetrace.read.story import Story, one_engine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

USES = ["decode", "prefill", "drafts"]
MOST_COLUMNS = 400  # more steps than this are drawn in groups, each as the mean of its steps


LINES = {"running": ("-", INK), "waiting": (":", INK)}


@dataclass(frozen=True)
class Share:
    """What one request took of one step's budget. kind is decode, prefill or drafts."""

    request_id: str
    kind: str
    num_tokens: int


def shares(story: Story) -> list[list[Share]]:
    """For each step of the story: decode first, then prefill, then drafts; within each in the order of the decision."""
    kinds: dict[tuple[int, str], str] = {}  # (column, request) -> prefill or decode
    for request in in_engine(story):
        for stretch in stretches(story, request):
            if stretch.kind in USES:  # else the recording lacks the end of a wait
                kinds.update(
                    {(column, request.request_id): stretch.kind for column in range(stretch.first, stretch.last + 1)}
                )
    of_steps: list[list[Share]] = []
    for column, step in enumerate(story.steps):
        found = [
            Share(i, kinds.get((column, i), "prefill"), scheduled.num_tokens) for i, scheduled in step.scheduled.items()
        ]
        found += [
            Share(i, "drafts", scheduled.num_drafts) for i, scheduled in step.scheduled.items() if scheduled.num_drafts
        ]
        of_steps.append(sorted(found, key=lambda share: USES.index(share.kind)))
    return of_steps


def token_budget(story: Story) -> Figure:
    """Above: the tokens of each step, stacked by use and request, under the budget. Below: running and waiting requests as the
    step begins. Raises TraceError without matplotlib."""
    story = one_engine(story)
    title = f"How {plural(len(story.steps), 'engine step')} used the token budget"
    group = max(1, -(-len(story.steps) // MOST_COLUMNS))
    title += f" (each bar: the mean of {group} steps)" if group > 1 else ""
    figure, (bars, queue) = new_figure(5.2, rows=[3, 1], title=title)
    if not story.steps:
        note(figure, "The recording holds no engine step.")
        return figure
    if group > 1:
        used = _draw_means(bars, story, group)
    else:
        used = _draw_shares(bars, story)
    _draw_budget(bars, story, used[1])
    _draw_queue(queue, story)
    for axes, most_ticks in ((bars, 8), (queue, 4)):
        whole_ticks(axes, most_ticks)
        step_ticks(axes, [step.step for step in story.steps])
    bars.set_xlabel("")
    bars.set_ylabel("tokens", fontsize=9, color=INK)
    queue.set_ylabel("requests", fontsize=9, color=INK)
    legend(bars, {kind: KINDS[kind] for kind in USES if kind in used[0]}, lines=LINES)
    return figure


def _draw_shares(axes: Axes, story: Story) -> tuple[set[str], float]:
    """A box per share, with the request's name where there is room. Returns the uses that occur and the largest sum."""
    of_steps, names = shares(story), drawn_names(story.requests)
    most = max(sum(share.num_tokens for share in step) for step in of_steps) or 1
    places: dict[str, list[Box]] = {kind: [] for kind in USES}
    column = 8.5 * 72 / max(len(of_steps), 20)  # points
    for x, step in enumerate(of_steps):
        top = 0
        for share in step:
            places[share.kind].append((x - 0.42, top, 0.84, share.num_tokens))
            name = names[share.request_id]
            size = min(8.0, (column * 0.84 - 1) / (0.62 * len(name)))
            if size >= 5 and share.num_tokens / most * 2.6 * 72 > size * 1.2:
                write(axes, x, top + share.num_tokens / 2, name, size, KINDS[share.kind])
            top += share.num_tokens
    plain = sum(map(len, places.values())) > MANY
    for kind, rectangles in places.items():
        boxes(axes, rectangles, KINDS[kind], plain)
    return {kind for kind, rectangles in places.items() if rectangles}, most


def _draw_means(axes: Axes, story: Story, group: int) -> tuple[set[str], float]:
    """A box per use and group of steps. Returns the uses that occur and the largest sum."""
    of_steps = shares(story)
    places: dict[str, list[Box]] = {kind: [] for kind in USES}
    most = 1.0
    for first in range(0, len(of_steps), group):
        steps, top = of_steps[first : first + group], 0.0
        for kind in USES:
            mean = sum(share.num_tokens for step in steps for share in step if share.kind == kind) / len(steps)
            if mean:
                places[kind].append((first - 0.5, top, len(steps), mean))
            top += mean
        most = max(most, top)
    for kind, rectangles in places.items():
        boxes(axes, rectangles, KINDS[kind], plain=True)
    return {kind for kind, rectangles in places.items() if rectangles}, most


def _draw_budget(axes: Axes, story: Story, most: float) -> None:
    """The line of the budget; where the bars would be flat under it, a sentence instead."""
    budget = max(step.budget for step in story.steps)
    top = budget if 0 < budget < 3 * most else most
    axes.set_ylim(0, top * 1.15)
    if budget == 0:
        return
    if top == budget:
        axes.axhline(budget, color=INK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"budget: {budget:,}",
            (1, budget),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=9,
            color=INK,
        )
    else:
        axes.annotate(
            f"budget: {budget:,}, far above this axis ↑",
            (1, 1),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=9,
            color=INK,
        )


def _draw_queue(axes: Axes, story: Story) -> None:
    xs = range(len(story.steps))
    running, waiting = [step.running for step in story.steps], [step.waiting for step in story.steps]
    for name, counts in (("running", running), ("waiting", waiting)):
        axes.step(xs, counts, LINES[name][0], where="mid", color=LINES[name][1], linewidth=1.4)
    axes.set_ylim(0, max(1, *running, *waiting) * 1.15)


def token_budget_table(story: Story) -> str:
    """One line per step: its tokens by use, the budget, who ran and waited as it began, and what each request got."""
    story = one_engine(story)
    names, rows = short_names(story.requests), []
    sign = {"decode": "", "prefill": " prefill", "drafts": " drafts"}
    for step, found in zip(story.steps, shares(story)):
        sums = {kind: sum(share.num_tokens for share in found if share.kind == kind) for kind in USES}
        who = ", ".join(f"{names[share.request_id]}: {share.num_tokens}{sign[share.kind]}" for share in found)
        numbers = [step.step, *sums.values(), step.total_tokens, step.budget, step.running, step.waiting]
        rows.append([*map(str, numbers), who])
    return columns(["step", *USES, "total", "budget", "running", "waiting", "who got what"], rows)
