"""Structured output in the engine: which tokens each request's grammar allows (vllm/v1/structured_output/__init__.py,
StructuredOutputManager).

The grammars themselves run in processes of their own (grammar/worker.py says why). This side holds a socket for each and what
was last heard over it. It imports neither torch nor xgrammar.
"""

from __future__ import annotations

import select
import socket
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.structured_output.grammar_template import GrammarTemplate
from stage03_engine.grammar.protocol import ACCEPT, CLOSE, OPEN, MatcherState, frame, read_message
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stage03_engine.tracing import tellable
from stagetrace import trace

MAX_COMPILING = 2  # at once; each takes a core
MAX_RESTARTS = 3  # for a request whose grammar process was killed before its first token
LOST = "lost the process in which its grammar ran, since that was killed; send the request again"

Key = tuple[str, str]


@dataclass
class _Request:
    params: StructuredOutputsParams
    ignore_eos: bool
    state: MatcherState | None = None  # None until the grammar is compiled
    num_restarts: int = 0


@dataclass
class _Grammar:
    """One grammar process. Its answers come in the order of the questions: `expected` names the requests of each."""

    socket: socket.socket
    number: int  # under which the template process knows it
    key: Key
    started: float
    compiled: bool = False
    users: dict[str, bool] = field(default_factory=dict)  # request id -> found the grammar here already
    expected: deque[list[str]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.stream = self.socket.makefile("rb")

    @property
    def busy(self) -> bool:
        """True when an answer is due."""
        return not self.compiled or bool(self.expected)

    def close(self) -> None:
        """The process ends when it reads the end of its socket, or at its next limit."""
        self.stream.close()
        self.socket.close()


class StructuredOutputManager:
    """Every request with a grammar, from arrival to end.

    Compiling never blocks: `poll` takes in what is ready. The grammar process of a finished request stays, so that the next
    request with the same grammar finds it compiled; the least recently used one makes room. Without a configuration it is
    for a scheduler without such requests.
    """

    def __init__(self, config: VllmConfig | None = None) -> None:
        self._config = config or VllmConfig()
        self._limits = self._config.structured_outputs_config
        self._template = GrammarTemplate(self._config)
        self._grammars: OrderedDict[Key, _Grammar] = OrderedDict()  # the least recently used one first
        self._requests: dict[str, _Request] = {}
        self._queued: deque[str] = deque()  # requests whose grammar has no process yet
        self._refused: dict[str, EngineCoreOutput] = {}

    # From arrival until the first token

    def grammar_init(self, request_id: str, params: SamplingParams) -> None:
        """Begin to compile; returns at once."""
        assert params.structured_outputs is not None
        self._requests[request_id] = _Request(params.structured_outputs, params.ignore_eos)
        self._queued.append(request_id)
        self._start_queued()

    def is_ready(self, request_id: str) -> bool:
        """Is it known which tokens may come first?"""
        return self._requests[request_id].state is not None

    @property
    def num_not_ready(self) -> int:
        """Requests that cannot run yet."""
        return sum(request.state is None for request in self._requests.values())

    def poll(self) -> list[EngineCoreOutput]:
        """Take in what has been compiled; returns the requests that must end, each with its error. Never blocks for long."""
        if self._requests:
            while ready := self._wait_for_answers(0.0):
                for grammar in ready:
                    self._receive(grammar)
            self._start_queued()
        refused, self._refused = list(self._refused.values()), {}
        return refused

    def wait(self, timeout: float) -> None:
        """Return when something is ready or `timeout` seconds are over; at once when nothing compiles."""
        self._wait_for_answers(timeout)

    def _wait_for_answers(self, timeout: float) -> list[_Grammar]:
        busy = {grammar.socket.fileno(): grammar for grammar in self._grammars.values() if grammar.busy}
        if not busy:
            return []
        poller = select.poll()
        for descriptor in busy:
            poller.register(descriptor, select.POLLIN)
        return [busy[descriptor] for descriptor, _ in poller.poll(timeout * 1000)]

    def _start_queued(self) -> None:
        """Give queued requests to their grammars, in order, as far as there is room."""
        while self._queued:
            request_id = self._queued[0]
            if request_id in self._requests:
                key = self._requests[request_id].params.key
                known = key in self._grammars
                if not known and not self._make_room():
                    return
                grammar = self._grammars[key] if known else self._start_grammar(key)
                self._grammars.move_to_end(key)
                grammar.users[request_id] = known
                if grammar.compiled:
                    self._open(grammar, request_id)
            self._queued.popleft()

    def _make_room(self) -> bool:
        if sum(not grammar.compiled for grammar in self._grammars.values()) >= MAX_COMPILING:
            return False
        if len(self._grammars) < self._limits.grammar_cache_size:
            return True
        idle = next((key for key, grammar in self._grammars.items() if grammar.compiled and not grammar.users), None)
        if idle is None:
            return False
        self._grammars.pop(idle).close()
        return True

    def _start_grammar(self, key: Key) -> _Grammar:
        grammar = self._grammars[key] = _Grammar(*self._template.connect(), key, time.monotonic())
        self._send(grammar, list(key))
        return grammar

    def _open(self, grammar: _Grammar, request_id: str) -> None:
        if trace.on:
            cached = grammar.users[request_id]
            seconds = 0.0 if cached else time.monotonic() - grammar.started
            trace.emit("grammar.compiled", req=request_id, kind=grammar.key[0], seconds=seconds, cached=cached)
        grammar.expected.append([request_id])
        self._send(grammar, [OPEN, {request_id: self._requests[request_id].ignore_eos}])

    # One step

    def grammar_bitmask(self, request_ids: list[str]) -> dict[str, bytes] | None:
        """What may come next, for those of these requests that have a grammar; None when none has."""
        states = {i: self._requests[i].state for i in request_ids if i in self._requests}
        return {i: state.mask for i, state in states.items() if state is not None} or None

    def accept_tokens(self, sampled: dict[str, list[int]]) -> tuple[set[str], dict[str, EngineCoreOutput]]:
        """Move on by the sampled tokens. Returns the requests whose output is complete, and those that must end in an error.

        All grammar processes are asked before the first answer is waited for: they work at the same time.
        """
        mine = [i for i in sampled if i in self._requests]
        of_grammar: dict[Key, list[str]] = {}
        for request_id in mine:
            of_grammar.setdefault(self._requests[request_id].params.key, []).append(request_id)
        for key, request_ids in of_grammar.items():
            self._grammars[key].expected.append(request_ids)
            self._send(self._grammars[key], [ACCEPT, {i: sampled[i] for i in request_ids}])
        for key in of_grammar:
            while key in self._grammars and self._grammars[key].expected:
                self._receive(self._grammars[key])
        failed = {i: self._refused.pop(i) for i in mine if i in self._refused}
        states = {i: self._requests[i].state for i in mine}
        return {i for i, state in states.items() if state is not None and state.complete}, failed

    def free(self, request_id: str) -> None:
        """The request has ended; one without a grammar is ignored."""
        request = self._requests.pop(request_id, None)
        self._refused.pop(request_id, None)
        if request is None:
            return
        grammar = self._grammars.get(request.params.key)
        if grammar is not None and grammar.users.pop(request_id, None) is not None and grammar.compiled:
            self._send(grammar, [CLOSE, request_id])

    # Talking to a grammar process

    def _send(self, grammar: _Grammar, message: list) -> None:
        try:
            grammar.socket.sendall(frame(message))
        except OSError:
            pass  # the process is gone: `_receive` finds out, and says so

    def _receive(self, grammar: _Grammar) -> None:
        """Take in one answer; the end of the process is one too."""
        try:
            answer = read_message(grammar.stream)
        except (EOFError, OSError) as error:
            killed = isinstance(error, TimeoutError) or self._template.was_killed(grammar.number)
            self._begin_again(grammar, killed)
            self._end_grammar(grammar, LOST if killed else self._limit_reached(grammar))
            return
        if grammar.compiled:
            for request_id, state in zip(grammar.expected.popleft(), answer, strict=True):
                self._update(request_id, MatcherState(*state))
        elif answer:
            self._end_grammar(grammar, f"cannot be used as a grammar: {answer}")
        else:
            grammar.compiled = True
            for request_id in grammar.users:
                self._open(grammar, request_id)

    def _update(self, request_id: str, state: MatcherState) -> None:
        request = self._requests.get(request_id)
        if request is None:  # it has ended meanwhile
            return
        if request.state is None and not state.mask:
            self._refuse(request_id, "matches no text at all, or only the empty one")
        elif state.stuck:
            self._refuse(request_id, "and the request's other settings together leave no token that may come next")
        else:
            request.state = state

    def _begin_again(self, grammar: _Grammar, killed: bool) -> None:
        """Its process has ended. Requests without a token get a new one, if somebody has killed it, or if the grammar had been
        of use before."""
        for request_id, known in list(grammar.users.items()):
            request = self._requests[request_id]
            if (
                request.state is None
                and request.num_restarts < MAX_RESTARTS
                and (killed or (known and grammar.compiled))
            ):
                del grammar.users[request_id]
                request.num_restarts += 1
                self._queued.append(request_id)

    def _limit_reached(self, grammar: _Grammar) -> str:
        memory = f"{self._limits.grammar_memory_bytes // 1024**2} MiB"
        if grammar.compiled:
            what, seconds = "its next token could not be found", self._limits.grammar_step_seconds
        else:
            what, seconds = "it could not be compiled", self._limits.grammar_compile_seconds
        return f"is too complex: {what} within {seconds} s of CPU time and {memory}"

    def _end_grammar(self, grammar: _Grammar, message: str) -> None:
        """Its process is of no more use; every request that counts on it ends."""
        del self._grammars[grammar.key]
        grammar.close()
        for request_id in grammar.users:
            self._refuse(request_id, message)

    def _refuse(self, request_id: str, message: str) -> None:
        request = self._requests[request_id]
        message = f"{request.params.source} {message}."
        if trace.on:
            trace.emit("grammar.refused", req=request_id, message=tellable(message))
        self._refused[request_id] = EngineCoreOutput(
            request_id, [], None, FinishReason.ERROR, error=message, error_param=request.params.source
        )

    def shutdown(self) -> None:
        """End all grammar processes."""
        for grammar in self._grammars.values():
            grammar.close()
        self._grammars.clear()
        self._template.shutdown()
