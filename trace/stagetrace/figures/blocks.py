"""The blocks of the KV cache over the steps: who holds which, what is shared, cached, free, evicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagetrace.figures.names import columns, drawn_names, plural, ranges, short_names
from stagetrace.figures.style import (
    INK,
    MANY,
    Box,
    Look,
    boxes,
    legend,
    new_figure,
    note,
    request_look,
    step_ticks,
    whole_ticks,
    write,
)
from stagetrace.read.story import BlockChange, Story, one_engine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARED, CACHED, FREE = Look("#b8b8b8", "////"), Look("#eeeeee", "...."), Look("#ffffff")
MARKS = {"evicted": ("X", "black"), "prefix hit": ("^", "white")}


@dataclass
class Pool:
    """The state of all blocks: `holders` of each held block in the order in which they came, and which can be found again."""

    holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)

    def change(self, change: BlockChange) -> None:
        """Apply one KV-cache event. Source: stage03_engine/core/block_pool.py, which does the same to the real blocks."""
        if change.name in ("kv.allocated", "sched.prefix_hit"):
            for block in change.blocks:
                self.holders[block] = (*self.holders.get(block, ()), change.req or "")
        elif change.name == "kv.freed":
            for block in change.blocks:
                left = tuple(holder for holder in self.holders.pop(block, ()) if holder != change.req)
                if left:
                    self.holders[block] = left
        elif change.name == "kv.cached":
            self.cached.update(change.blocks)
        elif change.name == "kv.evicted":
            self.cached.difference_update(change.blocks)
        else:
            self.cached.clear()

    def free_but_cached(self) -> set[int]:
        """Blocks that no request holds and a prefix hit would find."""
        return self.cached - self.holders.keys()


def pools(story: Story) -> Iterator[tuple[Pool, list[BlockChange]]]:
    """For each step of the story: the pool when its decision was complete, and the changes since the step before.

    The pool is one object that goes on changing. A step without a decision (the recording ends within it) has all that was recorded.
    """
    pool, done = Pool(), 0
    for step in story.steps:
        end = step.num_changes if step.decided_ns else len(story.blocks)
        changes = story.blocks[done:end]
        for change in changes:
            pool.change(change)
        done = max(done, end)
        yield pool, changes


@dataclass(frozen=True)
class Stretch:
    """A block that stays as it is from column `first` to column `last`; without holders it is free but cached."""

    block: int
    first: int
    last: int
    holders: tuple[str, ...]


def stretches(story: Story) -> list[Stretch]:
    """The whole map, run by run. Blocks that are free and hold nothing findable are left out."""
    found: list[Stretch] = []
    since: dict[int, tuple[int, tuple[str, ...]]] = {}  # block -> column, holders

    def close(block: int, column: int) -> None:
        first, holders = since.pop(block)
        found.append(Stretch(block, first, column - 1, holders))

    for column, (pool, changes) in enumerate(pools(story)):
        everything = any(change.name == "kv.reset" for change in changes)
        touched = set(since) if everything else set()
        for change in changes:
            touched.update(change.blocks)
        for block in touched:
            now = pool.holders.get(block, ()) if block in pool.holders or block in pool.cached else None
            if block in since and since[block][1] != now:
                close(block, column)
            if now is not None and block not in since:
                since[block] = (column, now)
    for block in list(since):
        close(block, len(story.steps))
    return sorted(found, key=lambda stretch: (stretch.block, stretch.first))


def num_usable(story: Story) -> int:
    """Blocks that requests can hold: block 0 is never given away. Without `scheduler.created`: the highest that was used."""
    highest = max((block for change in story.blocks for block in change.blocks), default=0)
    return max(story.settings.get("num_blocks", 1) - 1, highest)


def block_map(story: Story) -> Figure:
    """KV-cache blocks from 1 up over the steps, each as it was when the step's decision was complete.

    Of a large cache only the blocks up to the highest used one are shown. Raises TraceError without matplotlib.
    """
    story = one_engine(story)
    map_ = stretches(story)
    usable = num_usable(story)
    shown = min(usable, max((stretch.block for stretch in map_), default=0) + 1)
    unused = f" ({shown + 1}-{usable} never used)" if map_ and shown < usable else ""
    title = (
        f"Who holds which of {plural(usable, 'KV-cache block')}{unused}, over {plural(len(story.steps), 'engine step')}"
    )
    figure, (axes,) = new_figure(min(max(shown * 0.2, 1.0), 8) + 1.5, title=title)
    if not map_:
        note(figure, "The recording holds no step in which a KV-cache block was in use.")
        return figure
    _draw(axes, story, map_)
    step_ticks(axes, [step.step for step in story.steps])
    axes.set_ylim(shown + 0.6, 0.4)
    whole_ticks(axes, min(shown, 16))
    axes.set_ylabel("block", fontsize=9, color=INK)
    return figure


def _draw(axes: Axes, story: Story, map_: list[Stretch]) -> None:
    places: dict[tuple[str, ...], list[Box]] = {}
    joined = join(map_)
    plain = len(joined) > MANY or max(stretch.block for stretch in map_) > 120 or len(story.steps) > 1500
    for box, holders in joined:
        places.setdefault(holders if len(holders) < 2 else ("", ""), []).append(box)
    order = list(dict.fromkeys(change.req for change in story.blocks if change.req is not None))
    looks = {(request_id,): request_look(place) for place, request_id in enumerate(order)} | {
        (): CACHED,
        ("", ""): SHARED,
    }
    for holders, rectangles in places.items():
        boxes(axes, rectangles, looks[holders], plain)
    names = drawn_names(story.requests)
    if not plain:
        _write_holders(axes, joined, names, looks, len(story.steps))
    marks = _marks(axes, story)
    shown = (
        {names.get(i, i): looks[(i,)] for i in order[:14]}
        if len(order) <= 14
        else {"one request (looks repeat)": looks[(order[0],)]}
    )
    rest = {("", ""): "shared", (): "free, still cached"}
    legend(
        axes,
        shown | {text: looks[key] for key, text in rest.items() if key in places} | {"free": FREE},
        marks,
        plain=plain,
    )


def join(map_: list[Stretch]) -> list[tuple[Box, tuple[str, ...]]]:
    """Neighbouring blocks that are alike for the same steps, as one box each."""
    found: list[tuple[Box, tuple[str, ...]]] = []
    for stretch in sorted(map_, key=lambda s: (s.first, s.last, s.holders, s.block)):
        box = (stretch.first - 0.5, stretch.block - 0.5, stretch.last - stretch.first + 1.0, 1.0)
        if found:
            (x, y, width, height), holders = found[-1]
            if (x, y + height, width, holders) == (box[0], box[1], box[2], stretch.holders):
                found[-1] = (x, y, width, height + 1), holders
                continue
        found.append((box, stretch.holders))
    return found


def _write_holders(
    axes: Axes,
    joined: list[tuple[Box, tuple[str, ...]]],
    names: dict[str, str],
    looks: dict[tuple[str, ...], Look],
    num_steps: int,
) -> None:
    """The names of the holders where there is room for them."""
    for (x, y, width, height), holders in joined:
        text = "+".join(names.get(holder, holder) for holder in holders)
        if text and width * 8.5 * 72 / max(num_steps, 1) > len(text) * 5 + 2:
            write(axes, x + width / 2, y + height / 2, text, 7.5, looks[holders if len(holders) < 2 else ("", "")])


def _marks(axes: Axes, story: Story) -> dict[str, tuple[str, str]]:
    """Evictions, and blocks that a prefix hit found, at their step; return what was drawn."""
    drawn = {}
    for mark, name in (("evicted", "kv.evicted"), ("prefix hit", "sched.prefix_hit")):
        points = [
            (c - 0.5, b)
            for c, (_, changes) in enumerate(pools(story))
            for e in changes
            if e.name == name
            for b in e.blocks
        ]
        if points:
            xs, ys = zip(*points)
            size = 4.5 if len(points) < 500 else 1.5
            axes.plot(
                xs,
                ys,
                MARKS[mark][0],
                color=MARKS[mark][1],
                markeredgecolor=INK,
                markersize=size,
                markeredgewidth=0.6,
                zorder=3,
            )
            drawn[mark] = MARKS[mark]
    return drawn


def block_map_table(story: Story) -> str:
    """One line per step in which the map changed: how many blocks are free (and how many of those still cached), how many are held by
    several requests, what was evicted, and who holds which."""
    story = one_engine(story)
    names, rows = short_names(story.requests), []
    usable = num_usable(story)
    for step, (pool, changes) in zip(story.steps, pools(story)):
        if not changes:
            continue
        of: dict[str, list[int]] = {}
        for block, holders in pool.holders.items():
            for holder in holders:
                of.setdefault(holder, []).append(block)
        shared = sum(len(holders) > 1 for holders in pool.holders.values())
        evicted = ranges(b for change in changes if change.name == "kv.evicted" for b in change.blocks)
        held = ", ".join(f"{names.get(holder, holder)}: {ranges(blocks)}" for holder, blocks in of.items())
        free = usable - len(pool.holders)
        rows.append([str(step.step), str(free), str(len(pool.free_but_cached())), str(shared), evicted, held])
    return columns(["step", "free", "of them cached", "shared", "evicted", "who holds which blocks"], rows)
