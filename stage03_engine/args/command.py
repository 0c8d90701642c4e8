"""What every command does around its own work (vllm/entrypoints/utils.py)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stage03_engine.errors import StagesError

_ENVIRONMENT = {
    # Compute threads, the API server's event loop and the client share few cores. An OpenMP thread that waits for work
    # by spinning takes a core from the thread that would give it work, so waiting threads must sleep.
    "OMP_WAIT_POLICY": "PASSIVE",  # GNU OpenMP, which torch uses on Linux
    "KMP_BLOCKTIME": "0",  # LLVM and Intel OpenMP: the same, in milliseconds of spinning
    # A request's prompt is tokenised in well under a millisecond; a thread pool for it would compete for the same cores.
    "TOKENIZERS_PARALLELISM": "false",
}


def cli_env_setup() -> dict[str, str]:
    """Set the environment variables that libraries read once, when they are imported; return those that were set.

    A variable that the user has set is left alone. The engine process inherits them.
    """
    missing = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(missing)
    return missing


@contextmanager
def signals_are_ours() -> Iterator[None]:
    """Processes that are started inside the `with` block never receive SIGINT and SIGTERM, and neither do those that they start.

    Ctrl-C in a terminal, and systemd at the end of a service, send their signal to all processes of a server. Only the API
    process may act on it: running requests must finish first, for which it needs the engine and its helpers. Each of these
    ends when its end of a pipe or a socket closes. (vLLM's engine ends on SIGTERM.)
    """
    stops = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # a process inherits what is blocked
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


EXTRAS = {"openai": "client", "numba": "kernels", "triton": "kernels", "matplotlib": "trace", "transformers": "audio"}
"""Package that serving does not need -> the extra of pyproject.toml that installs it."""


def run_command(command: Callable[[], int]) -> int:
    """Call `command` and return its exit code. A StagesError becomes one line on stderr and its own exit code;
    so does a package that `make serve` leaves out. Ctrl-C ends silently with 130."""
    try:
        return command()
    except StagesError as error:
        print(f"stages: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        hint = f"pip install --editable '.[{EXTRAS[error.name]}]' adds it, make venv everything"
        print(f"stages: error: this needs {error.name}, which is not installed; {hint}", file=sys.stderr)
        return StagesError.exit_code
    except KeyboardInterrupt:
        return 130
