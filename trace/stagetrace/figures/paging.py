"""Where the tokens of a few requests lie: text, tokens, logical blocks, block table, pool. A picture of one moment, and the same as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagetrace.figures.blocks import CACHED, FREE, SHARED
from stagetrace.figures.names import columns, plural
from stagetrace.figures.style import INK, KINDS, PALE, Look, boxes, legend, new_figure, request_look, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GAP = 0.5  # between two blocks, in widths of a slot
ABOVE, BELOW = 3.2, 2.7  # of the pool: room for a request's text, tokens and block table, in heights of a slot
NO_SLOT = KINDS["no tokens"]


@dataclass(frozen=True)
class Paged:
    """A request at one moment. Its first `num_computed` tokens have keys and values, in the blocks of its table."""

    name: str
    tokens: Sequence[str]  # the text of each
    num_computed: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class Moment:
    """The pool at one moment: one or two requests, blocks that a prefix hit would find, and blocks that were just given."""

    requests: Sequence[Paged]
    block_size: int
    num_blocks: int
    cached: Collection[int] = ()
    new: Collection[int] = ()

    def holders(self, block: int) -> list[int]:
        """The places of the requests that have it in their tables."""
        return [place for place, request in enumerate(self.requests) if block in request.block_table]

    def look(self, block: int) -> Look:
        """As in the map of all blocks over time (`block_map`)."""
        holders = self.holders(block)
        if not holders:
            return CACHED if block in self.cached else FREE
        return request_look(holders[0]) if len(holders) == 1 else SHARED

    def slots(self, block: int) -> list[str]:
        """The tokens in its filled slots."""
        filled: list[str] = []
        for request in self.requests:
            if block in request.block_table:
                start = list(request.block_table).index(block) * self.block_size
                found = list(request.tokens[start : min(start + self.block_size, request.num_computed)])
                filled = max(filled, found, key=len)
        return filled


def paged_requests(moment: Moment, title: str = "", across: int = 4) -> Figure:
    """One request above the pool, a second one below it, `across` blocks in each row of the pool. Raises ValueError for more requests,
    TraceError without matplotlib."""
    if not 1 <= len(moment.requests) <= 2:
        raise ValueError(f"{plural(len(moment.requests), 'request')}: there is room for one or two")
    num_rows = -(-moment.num_blocks // across)
    height = ABOVE + 2 * num_rows + (BELOW if len(moment.requests) == 2 else 0)
    figure, (axes,) = new_figure(height * 0.36 + 0.9, title=title)
    axes.set_axis_off()
    axes.set_xlim(-0.6, across * (moment.block_size + GAP))
    axes.set_ylim(height, -0.4)
    for place in range(len(moment.requests)):
        _draw_request(axes, moment, place, 0.0 if place == 0 else ABOVE + 2 * num_rows, across)
    _draw_pool(axes, moment, across)
    _legend(axes, moment)
    return figure


def _left(moment: Moment, index: int) -> float:
    return index * (moment.block_size + GAP)


def _draw_request(axes: Axes, moment: Moment, place: int, top: float, across: int) -> None:
    """Its tokens, cut into logical blocks, and its block table next to the pool: the first request reads down, the second up."""
    request, look, first = moment.requests[place], request_look(place), place == 0
    tokens_at, table_at, text_at = (top + 0.8, top + 2.1, top) if first else (top + 1.1, top, top + 2.0)
    text = "".join(request.tokens).replace("\n", "\\n")
    axes.text(0, text_at + 0.3, f"{request.name}: “{text}”", fontsize=9, color=INK, va="center", weight="bold")
    for number, token in enumerate(request.tokens):
        x = _left(moment, number // moment.block_size) + number % moment.block_size
        cell = look if number < request.num_computed else NO_SLOT
        boxes(axes, [(x, tokens_at, 1, 0.7)], cell)
        write(axes, x + 0.5, tokens_at + 0.35, _visible(token), 7.5, cell)
    for logical, block in enumerate(request.block_table):
        x = _left(moment, logical)
        boxes(axes, [(x, table_at, moment.block_size, 0.6)], FREE)
        axes.text(x + moment.block_size / 2, table_at + 0.3, f"logical block {logical}  →  block {block}", fontsize=8, color=INK,
                  ha="center", va="center_baseline")  # fmt: skip
        _arrow(axes, moment, block, (x + moment.block_size / 2, table_at + (0.6 if first else 0)), across, first)


def _arrow(axes: Axes, moment: Moment, block: int, start: tuple[float, float], across: int, down: bool) -> None:
    """From an entry of a block table to its block in the pool."""
    row, column = divmod(block, across)
    end = (
        _left(moment, column) + moment.block_size * (0.4 if down else 0.6),
        ABOVE + 2 * row + (0.3 if down else 1.25),
    )
    style = {"arrowstyle": "->", "color": "black", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style, zorder=2.9)  # below all text


def _draw_pool(axes: Axes, moment: Moment, across: int) -> None:
    for block in range(moment.num_blocks):
        row, column = divmod(block, across)
        x, y = _left(moment, column), ABOVE + 2 * row + 0.55
        look, filled = moment.look(block), moment.slots(block)
        note = "the null block" if block == 0 else "new" if block in moment.new else ""
        axes.text(x, y - 0.2, f"{block}  {note}", fontsize=8, color=INK, weight="bold" if block in moment.new else None)
        for slot in range(moment.block_size):
            boxes(axes, [(x + slot, y, 1, 0.7)], look if slot < len(filled) or not moment.holders(block) else FREE)
            if slot < len(filled):
                write(axes, x + slot + 0.5, y + 0.35, _visible(filled[slot]), 7.5, look)
        edge, width = (INK, 2.6) if block in moment.new else (PALE if block == 0 else INK, 1.0)
        xs, ys = [x, x + moment.block_size, x + moment.block_size, x, x], [y, y, y + 0.7, y + 0.7, y]
        axes.plot(xs, ys, color=edge, linewidth=width, linestyle=":" if block == 0 else "-", zorder=3)


def _visible(token: str) -> str:
    """A token's text with its blanks made visible, short enough for a cell."""
    text = token.replace(" ", "·").replace("\n", "\\n")
    return text if len(text) <= 8 else text[:7] + "…"


def _legend(axes: Axes, moment: Moment) -> None:
    looks = {request.name: request_look(place) for place, request in enumerate(moment.requests)}
    blocks = range(1, moment.num_blocks)
    if any(len(moment.holders(block)) > 1 for block in blocks):
        looks["shared"] = SHARED
    if any(block in moment.cached and not moment.holders(block) for block in blocks):
        looks["free, still cached"] = CACHED
    legend(axes, looks | {"free": FREE, "sampled: has no slot before the next step": NO_SLOT})


def paged_requests_table(moment: Moment) -> str:
    """One line per block of each request: where its tokens lie, and with whom it shares the block."""
    return columns(["request", "logical block", "block", "tokens in it", "slots left", "note"], list(_rows(moment)))


def _rows(moment: Moment) -> Iterator[list[str]]:
    for place, request in enumerate(moment.requests):
        for logical, block in enumerate(request.block_table):
            start = logical * moment.block_size
            tokens = request.tokens[start : min(start + moment.block_size, request.num_computed)]
            others = [moment.requests[other].name for other in moment.holders(block) if other != place]
            notes = ["new"] * (block in moment.new) + [f"shared with {name}" for name in others]
            left = moment.block_size - len(tokens)
            yield [request.name, str(logical), str(block), " ".join(map(_visible, tokens)), str(left), ", ".join(notes)]
