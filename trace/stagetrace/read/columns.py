"""Events as lines of a terminal: one event per line, one column per process, an arrow where a message arrives."""

from __future__ import annotations

from typing import Any

from stagetrace.event import Event
from stagetrace.read.terminal import cut, milliseconds, phase_colour, short_id
from stagetrace.terminal import BOLD, DIM, RESET
from stagetrace.text import printable

_LEFT = 33  # columns before the first process: time, phase, step, request
_MIN_TEXT = 40  # the fewest columns that an event's text needs
_MIN_STRIDE = 4  # columns from one process to the next, at least
_QUIET = {"params", "block_hashes"}  # arguments that are for programs
_LEAVES = {"zmq.request_sent", "zmq.outputs_sent", "engine.hello", "engine.init_sent", "worker.hello", "worker.init_sent",
           "executor.step_sent", "worker.output_sent", "api_server.spawned", "dp.counts_sent", "dp.counts_published"}  # fmt: skip
_MAX_REMEMBERED = 10_000  # messages on the way, spans that are open


class Columns:
    """Turns events into lines. Processes get columns as they appear; those for which no column is left share the last one."""

    def __init__(self, width: int, colour: bool, *, whole: bool = False) -> None:
        """`whole`: lines may be longer than `width`, nothing is cut."""
        self.start_ns = 0  # times count from here
        self._width, self._colour, self._whole = width, colour, whole
        self._lanes: dict[int, int] = {}  # pid -> its place
        self._names: dict[int, str] = {}
        self._sent: dict[str, Event] = {}
        self._begun: dict[tuple[int, str], int] = {}  # (pid, span) -> its beginning
        self._took: int | None = None  # duration of the span that the last noted event ended
        self._num_columns, self._stride = 1, 0

    @property
    def num_processes(self) -> int:
        """How many have a column, or share one."""
        return len(self._lanes)

    def add_process(self, pid: int, name: str) -> None:
        """Give a process the next column."""
        if pid not in self._lanes:
            self._lanes[pid] = len(self._lanes)
            self._names[pid] = printable(name)
            self._lay_out()

    def note(self, event: Event) -> None:
        """Remember what later lines need, whether or not this event gets one."""
        self.add_process(event.pid, event.proc)
        self._took = None
        if event.name in _LEAVES or _is_send(event):
            _remember(self._sent, event.ref, event)
        if event.ph == "B":
            _remember(self._begun, (event.pid, event.name), event.ts)
        elif event.ph == "E":
            begun = self._begun.pop((event.pid, event.name), None)
            self._took = None if begun is None else event.ts - begun

    def heading(self) -> list[str]:
        """Which column is whose."""
        left = f"{'ms':>11} ph {'step':>5} request".ljust(_LEFT)
        lines: list[str] = []
        for pid, name in self._names.items():
            bars = "│".ljust(self._stride) * self._lane(pid)
            lines.append((" " * _LEFT if lines else left) + bars + f"{name} ({pid})")
        return [self._paint(line, BOLD) for line in lines]

    def line(self, event: Event) -> str:
        """One event, which was noted just before."""
        step = "" if event.step is None else str(event.step)
        request = "" if event.req is None else cut(short_id(event.req), 11)
        time = self._paint(f"{(event.ts - self.start_ns) / 1e6:11.3f}", DIM)
        phase = self._paint(f"{event.phase:>2}", phase_colour(event.phase))
        return f"{time} {phase} {step:>5} {request:<11} {self._body(event)}".rstrip()

    def _body(self, event: Event) -> str:
        """The event in the column of its process, and the arrow of a message that arrives."""
        lane, stride = self._lane(event.pid), self._stride
        name, words = printable(event.name), self._words(event)
        cause = self._sent.get(event.cause or "")
        sender = lane if cause is None else self._lane(cause.pid)
        before = "│".ljust(stride) * lane
        if sender < lane:  # from the left, through the columns in between
            before = "│".ljust(stride) * sender + "╰" + "─" * ((lane - sender) * stride - 2) + "▶"
        elif sender > lane:
            name = "◀─ " + name
        columns_right = self._num_columns - lane - 1
        separate = stride >= _MIN_TEXT and columns_right > 0  # wide enough: the text stays in its own column
        room = stride - 1 if separate else self._width - _LEFT - lane * stride
        text = f"{name} {words}".rstrip()
        text = text if self._whole else cut(text, room)
        line = before + self._paint(text[: len(name)], phase_colour(event.phase)) + text[len(name) :]
        return line + _text_after(stride - len(text), columns_right, stride) if separate else line

    def _words(self, event: Event) -> str:
        """What to print besides the name."""
        words = []
        if event.name in _LEAVES or _is_send(event):
            words.append("─▶")
        cause = self._sent.get(event.cause or "")
        if cause is not None:
            words.append(f"after {milliseconds(event.ts - cause.ts)} ms")
        if event.ph == "E":
            return " ".join([*words, f"end, {milliseconds(self._took)} ms"])
        if event.ph == "B":
            words.append("begin")
        return " ".join([*words, arguments(event.args)]).rstrip()

    def _lay_out(self) -> None:
        """How many columns fit, and how far it is from one to the next."""
        free = self._width - _LEFT
        fit = 1 + max(0, free - _MIN_TEXT) // _MIN_STRIDE
        count = self._num_columns = max(1, min(len(self._lanes), fit))
        self._stride = free if count == 1 else max(_MIN_STRIDE, min(free // count, (free - _MIN_TEXT) // (count - 1)))

    def _lane(self, pid: int) -> int:
        return min(self._lanes.get(pid, 0), self._num_columns - 1)

    def _paint(self, text: str, code: str) -> str:
        return f"{code}{text}{RESET}" if self._colour and text and code else text


def _is_send(event: Event) -> bool:
    """Do hidden states leave for the next stage of a pipeline? Their receipt ends the span that names this one."""
    return event.name == "worker.collective" and event.ph == "B" and event.args["kind"] == "send"


def _text_after(gap: int, columns: int, stride: int) -> str:
    """The lines of the columns to the right of a text."""
    return " " * gap + "│".ljust(stride) * (columns - 1) + "│" if gap > 0 else ""


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        del memory[next(iter(memory))]


def arguments(args: dict[str, Any]) -> str:
    """The arguments of an event in a few words, without what is empty or only for programs."""
    shown = [(key, value) for key, value in args.items() if key not in _QUIET and value not in (None, [], {}, "")]
    return " ".join(f"{key}={_value(value)}" for key, value in shown)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return _ranges(value)
    if isinstance(value, dict):
        return cut(printable("{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}"), 200)
    return cut(printable(value if isinstance(value, str) else str(value)), 60)


def _ranges(numbers: list[int]) -> str:
    """[4, 5, 6, 9] is 4-6,9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:8]]
    return "[" + ",".join(shown) + (f",… {len(numbers)} in all" if len(runs) > 8 else "") + "]"
