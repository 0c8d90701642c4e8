"""The process that reads a grammar first: `python -m stage03_engine.core.features.structured_output.grammar_checker`.

A grammar is a program that a stranger wrote, and compiling one can take any amount of time and memory: llguidance computes for
minutes and takes gigabytes for {"type": "integer", "multipleOf": 123456789}, and no limit of its own stops that. A thread of
the engine could not be stopped either. So each grammar is compiled here before the engine compiles it, in a copy of this process (fork)
that the operating system ends at a limit. The next grammar finds the process as warm as the first one did. It steps back for whatever
else wants to compute (nice). (vLLM compiles in the engine process, without limits.)

Messages are lines of JSON. To this process: [seconds, kind, text]. Back: [error or "", the grammar in Lark, what ended the copy or ""].
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from stage03_engine.args.command import signals_are_ours
from stage03_engine.args.processes import killed_after, wake_as_orphan
from stage03_engine.core.features.structured_output.backend_guidance import Guidance, Matcher
from stage03_engine.core.features.structured_output.lark import to_lark
from stage03_engine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from stage03_engine.core.features.structured_output.manifest import StructuredOutputsConfig

MAX_TRIES = 3  # if the process is killed from outside
ANSWER_TIMEOUT = 60.0  # seconds beyond the limit of CPU time; only a suspended or starved process takes this long
NICE = 5  # a quarter of a busy core: more would let grammars starve
LOST = "could not be compiled, since the process that checks it was killed; send the request again"

TIME, MEMORY, KILLED = "time", "memory", "killed"
"""What kills a copy: the limit on CPU time; on memory or the stack; another process."""


class TakesLonger(Exception):
    """The grammar is not compiled within this many seconds."""


class LostError(Exception):
    """The process was killed from outside: nothing is known about the grammar."""


class GrammarChecker:
    """The engine's end of the process. Serves one thread at a time; started with the first grammar."""

    def __init__(self, limits: StructuredOutputsConfig) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, kind: str, text: str, seconds: float) -> str:
        """The grammar in Lark, if it is compiled within `seconds` of CPU time. Raises TakesLonger if not, ValueError with what is wrong, and
        LostError."""
        for _ in range(MAX_TRIES):
            process = self._process = self._process or self._start()
            error, lark, ended_by = self._ask(process, kind, text, seconds) or ("", "", KILLED)
            if error:
                raise ValueError(error)
            if not ended_by:
                return lark
            if ended_by == TIME:
                raise TakesLonger
            if ended_by == MEMORY:
                raise ValueError(too_complex(self._limits))
            self._end(process)
            self._process = None
            if self._closed:
                break
        raise LostError(LOST)

    def _start(self) -> subprocess.Popen[bytes]:
        settings = [self._limits.grammar_memory_bytes, not self._limits.disable_any_whitespace]
        command, pipe = [sys.executable, "-m", __name__, json.dumps(settings)], subprocess.PIPE
        with signals_are_ours():  # a group of its own, so that a copy of it ends with it
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)

    def _ask(self, process: subprocess.Popen[bytes], kind: str, text: str, seconds: float) -> list[str] | None:
        """The answer; None if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            with killed_after(process, seconds + ANSWER_TIMEOUT):
                process.stdin.write(json.dumps([seconds, kind, text]).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Kill the process, if it runs, and its copy."""
        with suppress(ProcessLookupError, PermissionError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def shutdown(self) -> None:
        """End the process, from any thread."""
        self._closed = True
        if (process := self._process) is not None:
            self._end(process)


def too_complex(limits: StructuredOutputsConfig) -> str:
    """What a request is told whose grammar came to a limit."""
    seconds, memory = limits.grammar_compile_seconds, limits.grammar_memory_bytes // 1024**2
    return f"is too complex: it could not be compiled within {seconds} s of CPU time and {memory} MiB"


def _limit_memory(num_bytes: int) -> None:
    """This process may take so much more than it has now. Only Linux enforces it."""
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))


def check(backend: Guidance, kind: str, text: str, any_whitespace: bool) -> list[str]:
    """[error or "", the grammar in Lark]."""
    try:
        lark = to_lark(kind, text, any_whitespace)
        state = Matcher(backend, backend.compile(lark), ignore_eos=False).start()
    except RecursionError:
        return ["is nested too deeply", ""]
    except ValueError as error:
        return [str(error), ""]
    return [state.failed, lark]


def _answer(backend: Guidance, line: bytes, memory_bytes: int, any_whitespace: bool) -> None:
    """In a copy of the process: write the answer to the engine, or come to a limit before."""
    seconds, kind, text = json.loads(line)
    _limit_memory(memory_bytes)
    # The signal's default action ends the process wherever it is: native code need not come back to Python first.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    answer = [*check(backend, kind, text, any_whitespace), ""]
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(answer)


def _write(answer: list[str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Check one grammar after the other, until the engine closes the pipe."""
    wake_as_orphan()
    memory_bytes, any_whitespace = json.loads(sys.argv[1])
    os.nice(NICE)
    # the vocabulary does not matter here
    backend = Guidance(Vocabulary([bytes([byte]) for byte in range(256)], None), 256)
    check(backend, "choice", '["warm"]', any_whitespace)
    for line in sys.stdin.buffer:
        if (copy := os.fork()) == 0:
            wake_as_orphan()
            with suppress(BaseException):  # MemoryError among them
                _answer(backend, line, memory_bytes, any_whitespace)
                os._exit(0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        if status != 0:
            _write(["", "", {-signal.SIGPROF: TIME, -signal.SIGKILL: KILLED}.get(status, MEMORY)])


if __name__ == "__main__":
    main()
