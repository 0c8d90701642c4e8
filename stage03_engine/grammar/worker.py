"""The grammar processes: each runs one grammar, so that no grammar can harm anything but its own requests.

Compiling a grammar, or finding the tokens that may come next, can take any amount of time and memory: that is in the hands of
whoever wrote the grammar, and C++ in a thread cannot be stopped. So xgrammar runs out here, under limits that the operating
system enforces: on reaching one the process ends, the engine sees the end of its socket, and only that grammar's requests fail.
vLLM runs xgrammar in the engine process (v1/structured_output/backend_xgrammar.py) and has no such limits.

`main` is the template process: it imports xgrammar, reads the tokenizer, and forks one grammar process per socket that it is
sent. A fork costs milliseconds; starting from nothing would cost over a second. When a grammar process has ended without a word,
the template process can say by which signal.

Messages, both ways: length (4 bytes, little-endian), msgpack. Engine -> grammar process: [kind, text], then any number of
[OPEN, {id: ignore_eos}], [ACCEPT, {id: token ids}], [CLOSE, id]. Back: for the first an error text or "", for OPEN and ACCEPT a
list with a `MatcherState` for each id; for CLOSE nothing.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.grammar.protocol import ACCEPT, ASK, CLOSE, MatcherState, Stream, read_message, write_message

MAX_WHITESPACE = 16  # in a row, between two parts of a JSON text: a small model may else never get on


def make_tokenizer_info(config: VllmConfig) -> Any:
    """The model's vocabulary for xgrammar. Special tokens and padding ids have no text, so no grammar can ask for them."""
    import xgrammar

    tokenizer, size = init_tokenizer_from_configs(config), config.shape.vocab_size
    texts = [
        b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(min(size, tokenizer.vocab_size))
    ]
    eos = tokenizer.eos_token_id
    stop_token_ids = [] if eos is None or eos >= size else [eos]
    return xgrammar.TokenizerInfo(texts, vocab_size=size, stop_token_ids=stop_token_ids)


def compile_grammar(info: Any, kind: str, text: str, any_whitespace: bool = True) -> Any:
    """A `CompiledGrammar`. Raises RuntimeError with xgrammar's message."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if kind in ("json", "json_object"):
        schema = text if kind == "json" else '{"type":"object","additionalProperties":true}'
        return compiler.compile_json_schema(
            schema, any_whitespace=any_whitespace, max_whitespace_cnt=MAX_WHITESPACE if any_whitespace else None
        )
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "choice":
        text = "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return compiler.compile_grammar(text)


class Matchers:
    """Where each request stands in the grammar."""

    def __init__(self, grammar: Any, info: Any) -> None:
        import numpy as np
        import xgrammar

        self._grammar, self._info = grammar, info
        self._matchers: dict[str, Any] = {}
        self._ignore_eos: dict[str, bool] = {}
        self._new_matcher = xgrammar.GrammarMatcher
        self._mask = np.zeros((1, (info.vocab_size + 31) // 32), dtype=np.int32)

    def open(self, request_id: str, ignore_eos: bool) -> MatcherState:
        """A matcher at the start of the grammar."""
        self._matchers[request_id] = self._new_matcher(self._grammar)
        self._ignore_eos[request_id] = ignore_eos
        return self._state(request_id)

    def accept(self, request_id: str, token_ids: list[int]) -> MatcherState:
        """Move on by the tokens that were sampled."""
        matcher = self._matchers[request_id]
        if not all(matcher.accept_token(token_id) for token_id in token_ids):
            return MatcherState(b"", stuck=True)
        return MatcherState(b"", complete=True) if matcher.is_terminated() else self._state(request_id)

    def close(self, request_id: str) -> None:
        """The request is gone."""
        self._matchers.pop(request_id, None)
        self._ignore_eos.pop(request_id, None)

    def _state(self, request_id: str) -> MatcherState:
        """Invariant: a mask that is handed out allows at least one token."""
        matcher, mask = self._matchers[request_id], self._mask
        mask.fill(-1)
        matcher.fill_next_token_bitmask(mask, 0)
        complete = matcher.is_completed()
        with_eos = mask.tobytes()
        for token_id in self._info.stop_token_ids:
            mask[0, token_id // 32] &= ~(1 << (token_id % 32)) if token_id % 32 < 31 else 0x7FFFFFFF
        if not mask.any():
            return MatcherState(b"", complete=complete, stuck=not complete)
        return MatcherState(mask.tobytes() if self._ignore_eos[request_id] else with_eos)


def _limit_memory(num_bytes: int) -> None:
    """This process may take so much more than it has now. Only Linux enforces it."""
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))


def _limit_seconds(seconds: float) -> None:
    """From here on the process may compute for so long (CPU time, whatever else the machine does); 0 lifts the limit. The
    signal's default action ends the process wherever it is, so that C++ need not come back to Python first."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def serve_grammar(stream: Stream, info: Any, config: VllmConfig) -> None:
    """The life of a grammar process: compile, then answer until the engine closes the socket."""
    limits = config.structured_outputs_config
    kind, text = read_message(stream)
    _limit_memory(limits.grammar_memory_bytes)
    _limit_seconds(limits.grammar_compile_seconds)
    try:
        matchers = Matchers(compile_grammar(info, kind, text, not limits.disable_any_whitespace), info)
    except RuntimeError as error:  # what xgrammar raises
        if "bad_alloc" in str(error):
            raise MemoryError from error
        # The last line says what is wrong, after the time and the place in xgrammar's source.
        write_message(stream, re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip().splitlines()[-1]).strip(". "))
        return
    _limit_seconds(0)
    write_message(stream, "")
    while True:
        operation, argument = read_message(stream)
        if operation == CLOSE:
            matchers.close(argument)
            continue
        move = matchers.accept if operation == ACCEPT else matchers.open
        states = []
        for request_id, value in argument.items():
            _limit_seconds(limits.grammar_step_seconds)
            states.append(move(request_id, value))
        _limit_seconds(0)
        write_message(stream, states)


def _run_grammar_process(connection: socket.socket, info: Any, config: VllmConfig) -> NoReturn:
    """In the fork. Ends without Python's cleaning up, which belongs to the template process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the compiler's warnings are for nobody
    try:
        serve_grammar(connection.makefile("rwb"), info, config)
    except (EOFError, OSError, MemoryError):
        pass
    finally:
        os._exit(0)


class Children:
    """The grammar processes that were forked: those that may run, number -> process id, and by which signal others ended."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def reap(self) -> None:
        """Take note of those that have ended, so that the system can forget them."""
        for number in list(self.running):
            self._wait(number, os.WNOHANG)

    def signal_that_ended(self, number: int) -> int:
        """0 for one that ended by itself. Waits until it has ended."""
        if number in self.running:
            self._wait(number, 0)
        return self._ended.pop(number, 0)

    def _wait(self, number: int, how: int) -> None:
        pid, status = os.waitpid(self.running[number], how)
        if pid:
            del self.running[number]
            if os.WIFSIGNALED(status):
                self._ended[number] = os.WTERMSIG(status)


def main() -> int:
    """The template process. Its one argument is the number of an inherited socket; it ends when that closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(
        control.recv(4, socket.MSG_WAITALL), "little"
    )  # no buffer: it would swallow the first sockets
    config = msgspec.msgpack.decode(control.recv(size, socket.MSG_WAITALL), type=VllmConfig)
    info = make_tokenizer_info(config)
    gc.collect()
    gc.freeze()  # a fork shares the pages that the collector does not touch
    children = Children()
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            return 0
        number = int.from_bytes(control.recv(4, socket.MSG_WAITALL), "little")
        if kind == ASK:
            control.sendall(bytes([children.signal_that_ended(number)]))
            continue
        children.reap()
        if (pid := os.fork()) == 0:
            control.close()
            _run_grammar_process(socket.socket(fileno=descriptors[0]), info, config)
        children.running[number] = pid
        os.close(descriptors[0])


if __name__ == "__main__":
    sys.exit(main())
