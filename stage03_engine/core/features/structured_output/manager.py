"""Structured output in the engine: which tokens each request's grammar allows (vllm/v1/structured_output/__init__.py,
StructuredOutputManager).

Threads do the work, so that no grammar holds up the engine's steps: llguidance releases the interpreter lock while it compiles
and while it looks for the tokens that may come next. What they may cost is bounded: a grammar is compiled in a process that can be
stopped before it is compiled here, in one of two lanes (compilers.py); llguidance counts its work at each step; all grammars together
have `--grammar-budget-seconds` of a step (step_threads.py). In all queues API keys take turns, so none waits for the crowd of another.

Whatever is done at each step costs as much as what has changed, however many requests wait.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.structured_output.compilers import Compilation, Compilers
from stage03_engine.core.features.structured_output.step_threads import Job, StepThreads
from stage03_engine.core.features.turns.turns import Asker, Turns
from stage03_engine.messages import EngineCoreOutput, FinishReason
from stage03_engine.sampling_params import SamplingParams
from stage03_engine.tracing import trace_message
from stagetrace import trace
from stagetrace.ids import root_of

if TYPE_CHECKING:
    from stage03_engine.core.features.structured_output.backend_guidance import GrammarState, Guidance, Matcher

MAX_REMEMBERED = 1024  # refused grammars of each API key

Key = tuple[str, str, str | None]
"""Kind, text, and the salt of the request: who has another salt must not notice, by the time it takes, what was compiled."""


class _Tenant:
    """What an API key has of this room."""

    def __init__(self) -> None:
        self.grammars: OrderedDict[Key, _Grammar] = OrderedDict()  # with a place, the least recently used first
        self.parked: Turns[tuple[Asker, _Grammar]] = Turns()  # without a place
        self.refused: OrderedDict[bytes, str] = OrderedDict()  # digest of a Key -> why; the oldest first
        self.num_waiting = 0  # grammars that it brought, and that are not compiled


class _Grammar(Compilation):
    """One grammar, compiled or about to be."""

    def __init__(self, key: Key, payer: _Tenant) -> None:
        super().__init__(*key[:2])
        self.key = key
        self.payer = payer  # who brought it
        self.home: _Tenant | None = None  # in whose place it is; None: it waits for one, or is forgotten
        self.started = time.monotonic()
        self.ended = False  # compiled, refused or dropped
        self.users: dict[str, bool] = {}  # request -> found the grammar here already
        self.first: dict[bool, Job] = {}  # ignore_eos -> the state before the first token


@dataclass(eq=False)
class _Request:
    grammar: _Grammar
    asker: Asker
    source: str  # the field of the request that asked for it
    ignore_eos: bool
    matcher: Matcher | None = None  # from its first token on
    job: Job | None = None  # which moves it on
    state: GrammarState | None = None

    def accept(self, backend: Guidance, token_ids: list[int]) -> GrammarState:
        """Move on by these tokens."""
        from stage03_engine.core.features.structured_output.backend_guidance import Matcher

        if self.matcher is None:
            self.matcher = Matcher(backend, self.grammar.compiled, self.ignore_eos)
        return self.matcher.accept(token_ids)


class Accepted(NamedTuple):
    """What became of sampled tokens, of this step or of an earlier one."""

    known: set[str]  # requests whose next state is known; the others sit out
    complete: set[str]  # of them, those whose output is complete
    failed: dict[str, EngineCoreOutput]  # of them, those that must end in an error


class StructuredOutputManager:
    """Every request with a grammar, from arrival to end.

    Compiling never blocks: `poll` collects what is ready. The grammar of a finished request stays, so that the next request
    with the same grammar finds it compiled; of each API key, the least recently used one is evicted. A scheduler without such requests
    needs no configuration.
    """

    def __init__(self, config: VllmConfig | None = None) -> None:
        self._config = config or VllmConfig()
        self._limits = self._config.structured_outputs_config
        self._threads = StepThreads(self._limits.grammar_step_seconds)
        self._compilers: Compilers[_Grammar] = Compilers(self._limits, self._load, self._threads.news)
        self._lock = Lock()
        self._backend: Guidance | None = None
        self._grammars: dict[Key, _Grammar] = {}
        self._tenants: dict[int | None, _Tenant] = {}
        self._requests: dict[str, _Request] = {}
        self._num_ready = 0
        self._first_jobs: dict[Job, list[str]] = {}  # -> requests that wait for the state before their first token
        self._next_jobs: dict[Job, str] = {}  # -> the request that it moves on
        self._ready: dict[str, None] = {}  # since the last `take_ready`
        self._found: dict[str, None] = {}  # requests that have found their grammar compiled since the last `poll`
        self._refused: dict[str, EngineCoreOutput] = {}  # for the next `poll`
        self._known: dict[str, EngineCoreOutput | None] = {}  # for the next `accept_tokens`: moved on, or failed

    # From arrival until the first token

    def grammar_init(
        self, request_id: str, params: SamplingParams, salt: str | None = None, tenant: int | None = None
    ) -> None:
        """Start to compile; returns at once. Only requests with the same salt share what is compiled. A request that is refused
        ends with the next `poll`."""
        wanted = params.structured_outputs
        assert wanted is not None
        key, owner = (*wanted.key, salt), self._tenants.setdefault(tenant, _Tenant())
        known = self._grammars.get(key)
        grammar = known or _Grammar(key, owner)
        asker = Asker(tenant, root_of(request_id))
        self._requests[request_id] = _Request(grammar, asker, wanted.source, params.ignore_eos)
        if known is None:
            if (error := owner.refused.get(_digest(key))) is not None:
                return self._refuse(request_id, error)
            if owner.num_waiting >= self._limits.max_waiting_grammars:
                return self._refuse(
                    request_id, f"has to wait: {owner.num_waiting} other grammars are not compiled yet", busy=True
                )
            self._grammars[key] = grammar
            owner.num_waiting += 1
        grammar.users[request_id] = known is not None
        if grammar.home is not None:
            grammar.home.grammars.move_to_end(key)
        if grammar.ended:
            self._found[request_id] = None
        else:
            self._ask(grammar, asker)

    def _ask(self, grammar: _Grammar, asker: Asker) -> None:
        """Give the grammar a turn of this asker, or a place first."""
        if grammar.home is None:
            tenant = self._tenants[asker.tenant]
            if not self._make_room(tenant):
                tenant.parked.add(asker, (asker, grammar))
                return
            grammar.home = tenant
            tenant.grammars[grammar.key] = grammar
        self._compilers.add(asker, grammar)

    def _make_room(self, tenant: _Tenant) -> bool:
        if len(tenant.grammars) < self._limits.grammar_cache_size:
            return True
        idle = next((grammar for grammar in tenant.grammars.values() if grammar.ended and not grammar.users), None)
        if idle is not None:
            del self._grammars[idle.key], tenant.grammars[idle.key]
        return idle is not None

    def _use_room(self, tenant: _Tenant | None) -> None:
        """There may be a place for a grammar that waits for one."""
        while tenant is not None and tenant.parked and self._make_room(tenant):
            asker, grammar = tenant.parked.pop()
            if grammar.home is None and not grammar.ended:
                self._ask(grammar, asker)

    def take_ready(self) -> Iterable[str]:
        """The requests whose allowed first tokens are known since the last call."""
        ready, self._ready = self._ready, {}
        return ready

    @property
    def num_not_ready(self) -> int:
        """Requests that cannot run yet."""
        return len(self._requests) - self._num_ready

    def poll(self) -> list[EngineCoreOutput]:
        """Collect what has been compiled; returns the requests that must end, each with its error. Never blocks."""
        if self._compilers.has_done:
            for grammar in self._compilers.take_done():
                self._end_compilation(grammar)
        found, self._found = self._found, {}
        for request_id in found:
            self._open(request_id, cached=True)
        self._collect()
        refused, self._refused = list(self._refused.values()), {}
        return refused

    def wait(self, timeout: float) -> None:
        """Return when something is ready or `timeout` seconds are over. The threads go on with what is left of the last steps."""
        self._threads.run(
            timeout, lambda: self._compilers.has_done or (self._threads.has_done and not self._threads.busy)
        )

    def _load(self) -> Guidance:
        """With the first grammar: what only such requests need. Called in the threads that compile."""
        from stage03_engine.core.features.structured_output.backend_guidance import Guidance
        from stage03_engine.grammar.vocabulary import read_vocabulary

        with self._lock:
            if self._backend is None:
                self._backend = Guidance(read_vocabulary(self._config), self._config.shape.vocab_size)
            return self._backend

    def _end_compilation(self, grammar: _Grammar) -> None:
        """Its requests go on to their first state, or end with its error."""
        if grammar.dropped:
            return
        grammar.ended = True
        grammar.payer.num_waiting -= 1
        if not grammar.error:
            for request_id, cached in grammar.users.items():
                self._open(request_id, cached)
            self._use_room(None if grammar.users else grammar.home)
            return
        self._forget(grammar)
        if not grammar.lost:
            self._remember(grammar)
        for request_id in grammar.users:
            self._refuse(request_id, grammar.error)

    def _remember(self, grammar: _Grammar) -> None:
        """Each API key whose requests saw the refusal gets it again at once."""
        for asker in grammar.askers:
            refused = self._tenants[asker.tenant].refused
            refused[_digest(grammar.key)] = grammar.error
            if len(refused) > MAX_REMEMBERED:
                refused.popitem(last=False)

    def _open(self, request_id: str, cached: bool) -> None:
        """Its grammar is compiled: find the first state, unless a request with the same grammar has it already."""
        request = self._requests[request_id]
        grammar = request.grammar
        if trace.on:
            seconds = 0.0 if cached else time.monotonic() - grammar.started
            trace.emit("grammar.compiled", req=request_id, kind=grammar.kind, seconds=seconds, cached=cached)
        job = grammar.first.get(request.ignore_eos)
        if job is None:
            assert self._backend is not None
            job = Job(partial(_first_state, self._backend, grammar, request.ignore_eos))
            grammar.first[request.ignore_eos], self._first_jobs[job] = job, []
        if job.state is not None and job not in self._first_jobs:
            self._begin(request_id, job.state)
        else:
            self._first_jobs[job].append(request_id)
            self._threads.add(request.asker, job)

    def _begin(self, request_id: str, state: GrammarState) -> None:
        self._requests[request_id].state = state
        self._num_ready += 1
        self._ready[request_id] = None

    # One step

    def grammar_bitmask(self, request_ids: list[str]) -> dict[str, bytes] | None:
        """What may come next, for those of these requests that have a grammar; None when none has."""
        states = {i: self._requests[i].state for i in request_ids if i in self._requests}
        return {i: state.mask for i, state in states.items() if state is not None} or None

    def is_moving(self, request_id: str) -> bool:
        """Has its grammar not yet moved on by its last token?"""
        return request_id in self._requests and self._requests[request_id].job is not None

    @property
    def num_known(self) -> int:
        """How many requests have moved on since the last `accept_tokens`?"""
        return len(self._known)

    def accept_tokens(self, sampled: dict[str, list[int]]) -> Accepted:
        """Move on by the sampled tokens, within the budget of a step; what needs longer is returned by a later call."""
        for request_id, token_ids in sampled.items():
            request = self._requests.get(request_id)
            if request is not None:
                assert self._backend is not None
                request.job = job = Job(partial(request.accept, self._backend, token_ids))
                self._next_jobs[job] = request_id
                self._threads.add(request.asker, job)
        if self._threads.busy:
            self._threads.run(self._limits.grammar_budget_seconds)
        self._collect()
        known, self._known = self._known, {}
        states = {i: self._requests[i].state for i in known}
        complete = {i for i, state in states.items() if known[i] is None and state is not None and state.complete}
        return Accepted(set(known), complete, {i: failed for i, failed in known.items() if failed is not None})

    def _collect(self) -> None:
        """What the threads have found since, and what took them too long."""
        for job in self._threads.take_done():
            failed = f"is too complex: its next token could not be found within {self._limits.grammar_step_seconds} s"
            failed = failed if job.state is None else job.state.failed
            for request_id in self._first_jobs.pop(job, ()):
                request = self._requests.get(request_id)  # its id may have a new owner
                if request is not None and request.grammar.first.get(request.ignore_eos) is job:
                    if failed or job.state is None:
                        self._forget(request.grammar)
                        self._refuse(request_id, failed)
                    else:
                        self._begin(request_id, job.state)
            if (moved := self._next_jobs.pop(job, None)) is not None:
                self._requests[moved].job = None
                if failed or job.state is None:
                    self._forget(self._requests[moved].grammar)
                    self._known[moved] = self._error(moved, failed)
                else:
                    self._requests[moved].state = job.state
                    self._known[moved] = None

    def _forget(self, grammar: _Grammar) -> None:
        """The next request with this grammar compiles it anew: what is compiled grows with use, up to a limit."""
        if self._grammars.get(grammar.key) is grammar:
            del self._grammars[grammar.key]
        if (home := grammar.home) is not None:
            grammar.home = None
            del home.grammars[grammar.key]
            self._use_room(home)

    def free(self, request_id: str) -> None:
        """The request has ended; one without a grammar is ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for each in (self._found, self._ready, self._refused, self._known):
            each.pop(request_id, None)
        self._num_ready -= request.state is not None
        if request.job is not None:
            request.job.dropped = True
            self._next_jobs.pop(request.job, None)
        grammar = request.grammar
        grammar.users.pop(request_id, None)
        if grammar.users:
            return
        if not grammar.ended and not grammar.begun and self._grammars.get(grammar.key) is grammar:
            grammar.dropped = grammar.ended = True
            grammar.payer.num_waiting -= 1
            self._forget(grammar)
        elif grammar.ended:
            self._use_room(grammar.home)

    def _refuse(self, request_id: str, message: str, busy: bool = False) -> None:
        """The request ends before its first token."""
        self._refused[request_id] = self._error(request_id, message, busy)

    def _error(self, request_id: str, message: str, busy: bool = False) -> EngineCoreOutput:
        request = self._requests[request_id]
        message = f"{request.source} {message}."
        if trace.on:
            trace.emit("grammar.refused", req=request_id, message=trace_message(message))
        failed = EngineCoreOutput(request_id, [], None, FinishReason.ERROR, error=message, error_param=request.source)
        failed.busy = busy
        return failed

    def shutdown(self) -> None:
        """End the threads and the processes."""
        self._compilers.shutdown()
        self._threads.shutdown()


def _first_state(backend: Guidance, grammar: _Grammar, ignore_eos: bool) -> GrammarState:
    from stage03_engine.core.features.structured_output.backend_guidance import Matcher

    return Matcher(backend, grammar.compiled, ignore_eos).start()


def _digest(key: Key) -> bytes:
    return hashlib.sha256(repr(key).encode()).digest()
