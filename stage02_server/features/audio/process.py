"""The process that decodes sound: `python -m stage02_server.features.audio.process MAX_SECONDS CPU_SECONDS`.

A sound file is a stranger's, and its decoders are C: here one that loops, needs gigabytes or breaks harms nobody else. The operating
system ends this process when a file takes too long, refuses it memory, and lets it run only when others leave it time.
(vLLM decodes in the API process, without limits.)

For each file: its length (8 bytes, little-endian) and its content come in; [error or "", number of samples] goes out as a line of
JSON. If there is no error, the server answers with one byte, and unless it is 0 the samples follow, as float32.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator

import numpy as np

from stage02_server.features.audio.decode import Sound
from stage03_engine.args.processes import wake_as_orphan
from stage03_engine.errors import InvalidRequestError

MEMORY_BYTES = 1024**3  # beyond what the process has when it starts
NICENESS = 10


def _limit_process() -> None:
    """Only Linux enforces a limit of memory."""
    os.nice(NICENESS)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def _limit_seconds(seconds: float) -> None:
    """Limit the CPU time of this process from now on; 0 lifts the limit. The signal's default action ends the process
    wherever it is, also inside a decoder."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _opened(data: bytes, max_seconds: int) -> tuple[str, int, Iterator[np.ndarray]]:
    """(error or "", number of samples, the blocks of samples)."""
    try:
        sound = Sound(data, max_seconds)
        return "", sound.length(), sound.blocks()
    except InvalidRequestError as error:
        return str(error), 0, iter(())
    except MemoryError:
        return "file needs too much memory to be decoded.", 0, iter(())
    except Exception:  # decoders may do anything
        return "file cannot be decoded.", 0, iter(())


def main() -> int:
    """Decode until the server closes the pipe."""
    wake_as_orphan()
    files, answers = sys.stdin.buffer, sys.stdout.buffer
    max_seconds, cpu_seconds = int(sys.argv[1]), float(sys.argv[2])
    _limit_process()
    while len(head := files.read(8)) == 8:
        _limit_seconds(cpu_seconds)
        problem, length, blocks = _opened(files.read(int.from_bytes(head, "little")), max_seconds)
        answers.write(json.dumps([problem, length]).encode() + b"\n")
        answers.flush()
        if not problem and files.read(1) != b"\0":
            for block in blocks:
                answers.write(block.data)
            answers.flush()
        _limit_seconds(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
