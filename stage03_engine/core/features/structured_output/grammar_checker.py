"""The process that reads a grammar first: `python -m stage03_engine.core.features.structured_output.grammar_checker`.

A grammar is a program that a stranger wrote, and compiling one can take any amount of time and memory: llguidance computes for
minutes and takes gigabytes for {"type": "integer", "multipleOf": 123456789}, and no limit of its own stops that. A thread of
the engine could not be stopped either. So each grammar is compiled here before the engine compiles it; at a limit the operating
system ends this process, and another one is started for the next grammar. (vLLM compiles in the engine process, without limits.)

Messages are lines of JSON. To this process: [kind, text]. Back: [error or "", the grammar in Lark].
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from stage03_engine.args.command import signals_are_ours
from stage03_engine.core.features.structured_output.backend_guidance import Guidance, Matcher
from stage03_engine.core.features.structured_output.lark import to_lark
from stage03_engine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from stage03_engine.core.features.structured_output.flags import StructuredOutputsConfig

MAX_TRIES = 3  # if the process is killed from outside
ANSWER_TIMEOUT = 60.0  # seconds beyond the limit of CPU time; only a suspended process takes this long
LOST = "could not be compiled, since the process that checks it was killed; send the request again"


class GrammarChecker:
    """The engine's end of the process. Serves one thread at a time; started with the first grammar."""

    def __init__(self, limits: StructuredOutputsConfig) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, kind: str, text: str) -> str:
        """The grammar in Lark. Raises ValueError with what is wrong."""
        for _ in range(MAX_TRIES):
            process = self._process = self._process or self._start()
            if (answer := self._ask(process, kind, text)) is not None:
                error, lark = answer
                if error:
                    raise ValueError(error)
                return lark
            process.kill()  # changes nothing if it has ended by itself
            self._process = None
            if process.wait() != -signal.SIGKILL:
                seconds, memory = self._limits.grammar_compile_seconds, self._limits.grammar_memory_bytes // 1024**2
                raise ValueError(
                    f"is too complex: it could not be compiled within {seconds} s of CPU time and {memory} MiB"
                )
            if self._closed:
                break
        raise ValueError(LOST)

    def _start(self) -> subprocess.Popen[bytes]:
        limits = [self._limits.grammar_compile_seconds, self._limits.grammar_memory_bytes]
        command = [sys.executable, "-m", __name__, json.dumps([*limits, not self._limits.disable_any_whitespace])]
        with signals_are_ours():
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _ask(self, process: subprocess.Popen[bytes], kind: str, text: str) -> list[str] | None:
        """The answer; None if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], self._limits.grammar_compile_seconds + ANSWER_TIMEOUT)[0]:
                line = process.stdout.readline()
                return json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            pass
        return None

    def shutdown(self) -> None:
        """End the process, from any thread."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()


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


def main() -> None:
    """Check one grammar after the other, until the engine closes the pipe."""
    seconds, memory_bytes, any_whitespace = json.loads(sys.argv[1])
    backend = Guidance(
        Vocabulary([bytes([byte]) for byte in range(256)], None), 256
    )  # the vocabulary does not matter here
    check(backend, "choice", '["warm"]', any_whitespace)
    _limit_memory(memory_bytes)
    for line in sys.stdin.buffer:
        # The signal's default action ends the process wherever it is: native code need not come back to Python first.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            kind, text = json.loads(line)
            answer = check(backend, kind, text, any_whitespace)
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
