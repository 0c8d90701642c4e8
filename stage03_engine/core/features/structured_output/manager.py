"""Structured output in the engine: which tokens each request's grammar allows (vllm/v1/structured_output/__init__.py,
StructuredOutputManager).

Threads do the work, so that no grammar holds up the engine's steps: llguidance releases the interpreter lock while it compiles
and while it looks for the tokens that may come next. What a thread may cost is bounded three times: a grammar is compiled in a
process that can be stopped before it is compiled here (grammar_checker.py), llguidance counts its work at each step, and a step
waits for `--grammar-step-seconds` at most.
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, TimeoutError, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from stage03_engine.config import VllmConfig
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stage03_engine.sampling_params import SamplingParams
from stage03_engine.tracing import trace_message
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.features.structured_output.backend_guidance import GrammarState, Guidance, Matcher
    from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker

MAX_COMPILING = 2  # at once; each takes a core
MAX_STEPPING = 8  # threads that look for the next tokens

Key = tuple[str, str, str | None]
"""Kind, text, and the salt of the request: who has another salt must not notice, by the time it takes, what was compiled."""


@dataclass
class _Request:
    key: Key
    source: str  # the field of the request that asked for it
    ignore_eos: bool
    matcher: Matcher | None = None
    opening: Future[GrammarState] | None = None  # the first state, when the grammar is compiled
    opened: float = 0.0  # when that was asked for
    state: GrammarState | None = None


@dataclass
class _Grammar:
    """One grammar, compiled or about to be."""

    compiled: Future[Any]
    started: float
    users: dict[str, bool] = field(default_factory=dict)  # request id -> found the grammar here already


class StructuredOutputManager:
    """Every request with a grammar, from arrival to end.

    Compiling never blocks: `poll` collects what is ready. The grammar of a finished request stays, so that the next request
    with the same grammar finds it compiled; the least recently used one is evicted. A scheduler without such requests needs
    no configuration.
    """

    def __init__(self, config: VllmConfig | None = None) -> None:
        self._config = config or VllmConfig()
        self._limits = self._config.structured_outputs_config
        self._compilers = ThreadPoolExecutor(MAX_COMPILING, "grammar-compiler")
        self._steppers = ThreadPoolExecutor(MAX_STEPPING, "grammar-step")
        self._checkers: list[GrammarChecker] = []
        self._idle_checkers: queue.SimpleQueue[GrammarChecker] = queue.SimpleQueue()
        self._lock = Lock()
        self._backend: Guidance | None = None
        self._grammars: OrderedDict[Key, _Grammar] = OrderedDict()  # the least recently used one first
        self._requests: dict[str, _Request] = {}
        self._queued: deque[str] = deque()  # requests whose grammar has no place yet
        self._refused: dict[str, EngineCoreOutput] = {}

    # From arrival until the first token

    def grammar_init(self, request_id: str, params: SamplingParams, salt: str | None = None) -> None:
        """Start to compile; returns at once. Only requests with the same salt share what is compiled."""
        wanted = params.structured_outputs
        assert wanted is not None
        self._requests[request_id] = _Request((*wanted.key, salt), wanted.source, params.ignore_eos)
        self._queued.append(request_id)
        self._start_queued()

    def is_ready(self, request_id: str) -> bool:
        """Are the allowed first tokens known?"""
        return self._requests[request_id].state is not None

    @property
    def num_not_ready(self) -> int:
        """Requests that cannot run yet."""
        return sum(request.state is None for request in self._requests.values())

    def poll(self) -> list[EngineCoreOutput]:
        """Collect what has been compiled; returns the requests that must end, each with its error. Never blocks."""
        if self._requests:
            for key, grammar in list(self._grammars.items()):
                if grammar.compiled.done() and any(self._requests[i].opening is None for i in grammar.users):
                    self._open(key, grammar)
            for request_id, request in self._requests.items():
                if request.opening is not None and request.state is None:
                    self._first_state(request_id, request)
            self._start_queued()
        refused, self._refused = list(self._refused.values()), {}
        return refused

    def wait(self, timeout: float) -> None:
        """Return when something is ready or `timeout` seconds are over; at once when nothing compiles."""
        due: list[Future[Any]] = [g.compiled for g in self._grammars.values() if not g.compiled.done()]
        due += [r.opening for r in self._requests.values() if r.opening is not None and r.state is None]
        wait(due, timeout, FIRST_COMPLETED)

    def _start_queued(self) -> None:
        """Give queued requests their grammars, in order, while there is room."""
        while self._queued:
            request_id = self._queued[0]
            if request_id in self._requests:
                key = self._requests[request_id].key
                known = key in self._grammars
                if not known:
                    if not self._make_room():
                        return
                    self._grammars[key] = _Grammar(self._compilers.submit(self._compile, key), time.monotonic())
                self._grammars.move_to_end(key)
                self._grammars[key].users[request_id] = known
            self._queued.popleft()

    def _make_room(self) -> bool:
        if len(self._grammars) < self._limits.grammar_cache_size:
            return True
        idle = next(
            (key for key, grammar in self._grammars.items() if grammar.compiled.done() and not grammar.users), None
        )
        if idle is None:
            return False
        del self._grammars[idle]
        return True

    def _compile(self, key: Key) -> Any:
        """In a thread of its own. Raises ValueError with what is wrong."""
        with self._lock:
            if self._backend is None:
                self._load()
        checker = self._idle_checkers.get()
        try:
            lark = checker.check(*key[:2])
        finally:
            self._idle_checkers.put(checker)
        assert self._backend is not None
        return self._backend.compile(lark)

    def _load(self) -> None:
        """With the first grammar: what only such requests need."""
        from stage03_engine.core.features.structured_output.backend_guidance import Guidance
        from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker
        from stage03_engine.grammar.vocabulary import read_vocabulary

        self._checkers = [GrammarChecker(self._limits) for _ in range(MAX_COMPILING)]
        for checker in self._checkers:
            self._idle_checkers.put(checker)
        self._backend = Guidance(read_vocabulary(self._config), self._config.shape.vocab_size)

    def _open(self, key: Key, grammar: _Grammar) -> None:
        """A compiled grammar: start to compute the first tokens of the requests that wait for it, or end them with its error."""
        if (error := grammar.compiled.exception()) is not None:
            del self._grammars[key]
            for request_id in grammar.users:
                self._refuse(request_id, str(error) if isinstance(error, ValueError) else "cannot be compiled")
            return
        from stage03_engine.core.features.structured_output.backend_guidance import Matcher

        for request_id, cached in grammar.users.items():
            request = self._requests[request_id]
            if request.opening is None:
                if trace.on:
                    seconds = 0.0 if cached else time.monotonic() - grammar.started
                    trace.emit("grammar.compiled", req=request_id, kind=key[0], seconds=seconds, cached=cached)
                assert self._backend is not None
                request.matcher = Matcher(self._backend, grammar.compiled.result(), request.ignore_eos)
                request.opening = self._steppers.submit(request.matcher.start)
                request.opened = time.monotonic()

    def _first_state(self, request_id: str, request: _Request) -> None:
        assert request.opening is not None
        if request.opening.done() or time.monotonic() - request.opened > self._limits.grammar_step_seconds:
            self._update(request_id, request.opening, timeout=0.0)

    # One step

    def grammar_bitmask(self, request_ids: list[str]) -> dict[str, bytes] | None:
        """What may come next, for those of these requests that have a grammar; None when none has."""
        states = {i: self._requests[i].state for i in request_ids if i in self._requests}
        return {i: state.mask for i, state in states.items() if state is not None} or None

    def accept_tokens(self, sampled: dict[str, list[int]]) -> tuple[set[str], dict[str, EngineCoreOutput]]:
        """Move on by the sampled tokens. Returns the requests whose output is complete, and those that must end in an error."""
        steps: dict[str, Future[GrammarState]] = {}
        for request_id, token_ids in sampled.items():
            request = self._requests.get(request_id)
            if request is not None and request.matcher is not None:
                steps[request_id] = self._steppers.submit(request.matcher.accept, token_ids)
        for request_id, step in steps.items():
            self._update(request_id, step, self._limits.grammar_step_seconds)
        failed = {i: self._refused.pop(i) for i in steps if i in self._refused}
        states = {i: self._requests[i].state for i in steps}
        return {i for i, state in states.items() if state is not None and state.complete}, failed

    def _update(self, request_id: str, step: Future[GrammarState], timeout: float) -> None:
        """Collect the state after a step, or give up waiting for it."""
        try:
            state = step.result(timeout)
        except TimeoutError:
            # The thread is lost until llguidance comes back, and so are the others of its pool that wait for it.
            self._steppers.shutdown(wait=False)
            self._steppers = ThreadPoolExecutor(MAX_STEPPING, "grammar-step")
            seconds = self._limits.grammar_step_seconds
            self._fail(request_id, f"is too complex: its next token could not be found within {seconds} s")
            return
        if state.failed:
            self._fail(request_id, state.failed)
        else:
            self._requests[request_id].state = state

    def _fail(self, request_id: str, message: str) -> None:
        """The request ends. Its grammar is compiled anew for the next one: what is compiled grows with use, up to a limit."""
        if (grammar := self._grammars.pop(self._requests[request_id].key, None)) is not None:
            self._queued.extend(i for i in grammar.users if self._requests[i].opening is None)
        self._refuse(request_id, message)

    def free(self, request_id: str) -> None:
        """The request has ended; one without a grammar is ignored."""
        request = self._requests.pop(request_id, None)
        self._refused.pop(request_id, None)
        if request is not None and (grammar := self._grammars.get(request.key)) is not None:
            grammar.users.pop(request_id, None)

    def _refuse(self, request_id: str, message: str) -> None:
        request = self._requests[request_id]
        message = f"{request.source} {message}."
        if trace.on:
            trace.emit("grammar.refused", req=request_id, message=trace_message(message))
        self._refused[request_id] = EngineCoreOutput(
            request_id, [], None, FinishReason.ERROR, error=message, error_param=request.source
        )

    def shutdown(self) -> None:
        """End the threads and the processes."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._steppers.shutdown(wait=False, cancel_futures=True)
        for checker in self._checkers:
            checker.shutdown()
