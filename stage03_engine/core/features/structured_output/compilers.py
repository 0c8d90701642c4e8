"""Two lanes in which grammars are compiled, so that one that takes a moment never waits for one that takes long.

Every grammar is tried in the quick lane, for QUICK_SECONDS of CPU time at most. What needs longer goes into the slow lane, where it may
take `--grammar-compile-seconds`. In both lanes API keys take turns, then HTTP requests (turns.py). Each lane has a thread and a process
(grammar_checker.py), so the compilers take two cores at most, and one key cannot hold both while another waits: a new grammar waits for
one try of each other key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stage03_engine.core.features.turns.turns import Asker, Turns

if TYPE_CHECKING:
    from stage03_engine.core.features.structured_output.backend_guidance import Guidance
    from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker
    from stage03_engine.core.features.structured_output.manifest import StructuredOutputsConfig

QUICK_SECONDS = 0.25


@dataclass(eq=False)
class Compilation:
    """A grammar on its way to the compiled form."""

    kind: str
    text: str
    askers: set[Asker] = field(default_factory=set)  # it has a place in the queue with each; the first turn counts
    lane: int = 0
    begun: bool = False  # in its lane
    dropped: bool = False  # nobody waits for it any more
    compiled: Any = None  # the LLMatcher, or None
    error: str = ""  # why there is none
    lost: bool = False  # the error says nothing about the grammar


C = TypeVar("C", bound=Compilation)


class Compilers(Generic[C]):
    """Both lanes. The threads start with the first grammar."""

    def __init__(self, limits: StructuredOutputsConfig, load: Callable[[], Guidance], news: Condition) -> None:
        self.limits = limits
        self._load, self._news = load, news
        self._work = Condition()
        self._lanes: tuple[Turns[C], Turns[C]] = (Turns(), Turns())
        self._done: list[C] = []
        self._checkers: list[GrammarChecker] = []
        self._closed = False

    def add(self, asker: Asker, compilation: C) -> None:
        """Queue a grammar; or, if it is queued already, let it have the turn of this asker too."""
        with self._work:
            if asker not in compilation.askers and not compilation.begun:
                compilation.askers.add(asker)
                self._lanes[compilation.lane].add(asker, compilation)
                if not self._checkers:
                    self._start()
                self._work.notify_all()

    def _start(self) -> None:
        from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker

        self._checkers = [GrammarChecker(self.limits) for _ in self._lanes]
        for number in range(len(self._lanes)):
            Thread(target=self._serve, args=(number,), name="grammar-compiler", daemon=True).start()

    def _serve(self, number: int) -> None:
        """The thread of one lane."""
        while (compilation := self._next(number)) is not None:
            if not self._compile(compilation, number):
                continue
            with self._news:
                self._done.append(compilation)
                self._news.notify_all()

    def _next(self, number: int) -> C | None:
        with self._work:
            while not self._closed:
                while self._lanes[number]:
                    compilation = self._lanes[number].pop()
                    if compilation.lane == number and not compilation.dropped and not compilation.begun:
                        compilation.begun = True
                        return compilation
                self._work.wait()
        return None

    def _compile(self, compilation: C, number: int) -> bool:
        """False if it is to go on in the slow lane."""
        from stage03_engine.core.features.structured_output.grammar_checker import LostError, TakesLonger, too_complex

        longest = self.limits.grammar_compile_seconds
        seconds = min(QUICK_SECONDS, longest) if number == 0 else longest
        try:
            backend = self._load()
            lark = self._checkers[number].check(compilation.kind, compilation.text, seconds)
            # The same work as the process has just done within its limits, so it needs no limit of its own.
            compilation.compiled = backend.compile(lark)
        except TakesLonger:
            if number == 0 and seconds < longest:
                self._to_slow_lane(compilation)
                return False
            compilation.error = too_complex(self.limits)
        except LostError as error:
            compilation.error, compilation.lost = str(error), True
        except ValueError as error:
            compilation.error = str(error)
        except BaseException:  # a panic of llguidance is not even an Exception
            compilation.error, compilation.lost = "cannot be compiled", True
        return True

    def _to_slow_lane(self, compilation: C) -> None:
        with self._work:
            compilation.lane, compilation.begun = 1, False
            for asker in compilation.askers:
                self._lanes[1].add(asker, compilation)
            self._work.notify_all()

    @property
    def has_done(self) -> bool:
        """Is there anything for `take_done`?"""
        return bool(self._done)

    def take_done(self) -> list[C]:
        """What has been compiled, or refused, since."""
        with self._news:
            done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        """End the processes, and the threads."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        for checker in self._checkers:
            checker.shutdown()
