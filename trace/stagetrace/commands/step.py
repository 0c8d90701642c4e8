"""`step RUN`: walk through a recording, forward and back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase

from stagetrace.commands.common import add_run, open_recording
from stagetrace.event import Event
from stagetrace.read.columns import arguments
from stagetrace.read.lanes import engine_number
from stagetrace.read.selection import names_request
from stagetrace.read.terminal import add_colour, ascii_if_needed, milliseconds, phase_colour, short_id
from stagetrace.read.walk import EngineState, Place, Walk
from stagetrace.terminal import BOLD, DIM, RawHelpFormatter, painted, wants_colour
from stagetrace.text import printable
from stagetrace.vocabulary import VOCABULARY

HELP = """Enter, n [N]  the next event, or N events forward
b [N]         back, one event or N
s N           to the beginning of the engine's step N; s N E: of engine E's, if there are several
t N           to the N-th token: of the request that `r` chose, else of all requests
/NAME         to the next event of this name or pattern (/sched.pre, /kv.*); / alone repeats
r ID          only this request from here on; r alone: all again
?             this list
q             the end"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, and what the keys do."""
    add_run(parser)
    add_colour(parser)
    parser.formatter_class = RawHelpFormatter
    parser.epilog = "Commands, from the keyboard or a script on stdin:\n" + HELP


def run(args: argparse.Namespace) -> int:
    """Read commands until the end of the input, or q."""
    recording = open_recording(args.run)
    session = _Session(Walk(recording), recording.start_ns(), wants_colour(args.color), recording.processes())
    session.show()
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("step> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            return 0
        if line.strip() == "q":
            return 0
        session.do(line.strip())


class _Session:
    """What one person has chosen so far."""

    def __init__(self, walk: Walk, start_ns: int, colour: bool, names: dict[int, str]) -> None:
        self._names = names
        self._walk, self._start_ns, self._colour = walk, start_ns, colour
        self._req: str | None = None
        self._pattern = ""

    def do(self, line: str) -> None:
        """Run one command, and show where it leads."""
        word, _, rest = line.partition(" ")
        if line.startswith("/"):
            self._find(line[1:].strip())
        elif word in ("", "n", "b"):
            self._move(self._walk.back if word == "b" else self._walk.forward, rest or "1")
        elif word in ("s", "t"):
            self._jump(word, rest)
        elif word == "r":
            self._choose(rest.strip())
        else:
            print(HELP if word == "?" else f"no command {line!r}; ? lists them")

    def show(self) -> None:
        """The event under the cursor: what it means, and the state after it."""
        place = self._walk.place
        if place is not None:
            for line in self._lines(place):
                print(ascii_if_needed(line))

    def _lines(self, place: Place) -> list[str]:
        event = place.event
        row = VOCABULARY.get(event.name)
        head = [
            f"#{place.number}",
            f"{milliseconds(event.ts - self._start_ns)} ms",
            f"{printable(event.proc)} ({event.pid})",
        ]
        head.append(self._paint(f"phase {event.phase}", phase_colour(event.phase)))
        if event.step is not None:
            head.append(f"step {event.step}")
        if event.req is not None:
            head.append(short_id(event.req))
        name = self._paint(printable(event.name), BOLD) + {"B": " begin", "E": " end"}.get(event.ph, "")
        lines = ["  ".join(head), f"  {name} {arguments(event.args)}".rstrip()]
        if event.cause is not None:
            lines.append(f"  caused by {printable(event.cause)} (pid:number)")
        if row is not None:
            lines += [
                f"  {row.meaning}",
                self._paint(f"  in vLLM: {row.vllm}   here: {row.stage}, {printable(event.src)}", DIM),
            ]
        name = self._names.get(place.engine, "engine") if len(place.states) > 1 else "engine"
        return [*lines, "  " + _state(place.state, name), ""]

    def _move(self, way: Callable[[Callable[[Place], bool]], bool], text: str) -> None:
        count = _number(text)
        if count is None:
            return
        for _ in range(count):
            if not way(self._is_meant):
                print("the recording ends here" if way == self._walk.forward else "the recording begins here")
                break
        self.show()

    def _jump(self, word: str, text: str) -> None:
        text, _, engine = text.strip().partition(" ") if word == "s" else (text, "", "")
        number = _number(text)
        if number is None or (engine and not engine.isdecimal() and _number(engine) is None):
            return
        if word == "s":
            what = f"step {number}" + (f" of engine {int(engine)}" if engine else "")
            found = self._walk.from_start(lambda place: _begins(place.event, number, int(engine) if engine else None))
        else:
            what = f"token {number}"
            found = self._walk.from_start(lambda place: self._tokens(place) >= number)
        print(f"no {what} in this recording") if not found else self.show()

    def _tokens(self, place: Place) -> int:
        """How many tokens there are so far, if this event brings one."""
        if place.event.name != "sched.token" or not self._is_meant(place):
            return 0
        if self._req is None:
            return sum(state.num_tokens for state in place.states.values())
        return int(place.event.args["num_output_tokens"])

    def _find(self, pattern: str) -> None:
        self._pattern = pattern or self._pattern
        wanted = self._pattern if any(char in self._pattern for char in "*?[") else f"*{self._pattern}*"
        if not self._walk.forward(lambda place: self._is_meant(place) and fnmatchcase(place.event.name, wanted)):
            print(f"no {self._pattern or 'event'} after this one")
        else:
            self.show()

    def _choose(self, part: str) -> None:
        self._req = part or None
        place = self._walk.place
        meant = place is None or self._is_meant(place)
        if meant or self._walk.forward(self._is_meant) or self._walk.from_start(self._is_meant):
            self.show()
        else:
            self._req = None
            print(f"no request {part} in this recording")

    def _is_meant(self, place: Place) -> bool:
        return self._req is None or (place.event.req is not None and names_request(self._req, place.event.req))

    def _paint(self, text: str, code: str) -> str:
        return painted(text, code, self._colour)


def _begins(event: Event, step: int, engine: int | None) -> bool:
    """Does this step begin with the event? `engine`: only of this engine."""
    if event.name != "engine.step" or event.ph != "B" or event.step != step:
        return False
    return engine is None or engine == (engine_number(event.proc) or 0)


def _number(text: str) -> int | None:
    if text.strip().isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    print(f"expected a number, not {printable(text.strip())!r}; ? lists the commands")
    return None


def _state(state: EngineState, name: str) -> str:
    """The engine in one line."""
    if state.num_blocks is None and not state.step and not state.waiting:
        return "engine: not there yet"
    blocks = "?" if state.free_blocks is None else f"{state.free_blocks}"
    total = "" if state.num_blocks is None else f" of {state.num_blocks}"
    budget = "?" if state.budget_left is None else f"{state.budget_left} of {state.budget}"
    return (
        f"{name}: step {state.step} | running {_requests(state.running)} | waiting {_requests(state.waiting)} | "
        f"free blocks {blocks}{total} | budget left {budget} | tokens so far {state.num_tokens}"
    )


def _requests(ids: tuple[str, ...]) -> str:
    shown = " ".join(map(short_id, ids[:6]))
    return f"{len(ids)}" + (f": {shown}" if ids else "") + (" ..." if len(ids) > 6 else "")
