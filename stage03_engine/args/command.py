"""What every command does around its own work: environment, parser, dispatch, errors to exit codes.

Source: vllm/entrypoints/common/startup.py, vllm/entrypoints/cli/main.py and types.py (CLISubcommand).
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from stage03_engine.args.parser import FlexibleArgumentParser, did_you_mean
from stage03_engine.errors import ConfigError, StagesError
from stagetrace import trace
from stagetrace.redact import redact_argv, redact_values
from stagetrace.terminal import complain, quiet_pipe, whole_words
from stagetrace.text import printable

WAITING = {
    "OMP_WAIT_POLICY": "PASSIVE",  # GNU OpenMP, which torch uses on Linux
    "GOMP_SPINCOUNT": "10000",  # the same: how often a thread looks for work before it sleeps, some 0.1 ms in all
    "KMP_BLOCKTIME": "0",  # LLVM and Intel OpenMP: the same, in milliseconds
}
"""How compute threads wait for work: they spin for less time than it takes to wake one, then sleep. One that spins for long takes its
core from the thread that would give it work, such as the API process. args/cpu.py has the numbers."""

_ENVIRONMENT = {
    # A request's prompt is tokenised in well under a millisecond; a thread pool for it would compete for the same cores.
    "TOKENIZERS_PARALLELISM": "false",
}


def cli_env_setup() -> dict[str, str]:
    """Set the environment variables that libraries read once, when they are imported; return those that were set.

    A variable that the user has set is left alone, and none of WAITING is set beside another of them. The engine process inherits them.
    """
    wanted = _ENVIRONMENT if any(name in os.environ for name in WAITING) else WAITING | _ENVIRONMENT
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    return missing


@contextmanager
def signals_are_ours() -> Iterator[None]:
    """Processes that are started inside the `with` block never receive SIGINT and SIGTERM, and neither do those that they start.

    Ctrl-C in a terminal, and systemd when it stops a service, signal all processes of a server. Only the API process may act on
    the signal: running requests must finish first, and for that it needs the engine and its helpers. Each of these
    ends when its end of a pipe or a socket closes. (vLLM's engine ends on SIGTERM.)

    What is blocked belongs to the thread, so nothing may be awaited inside the block: of two tasks that are in it at once, the
    last to leave would put back what the first had blocked, for good.
    """
    stops = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # a process inherits what is blocked
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
EXTRAS = {"openai": "client", "triton": "kernels", "matplotlib": "trace", "transformers": "audio"}
"""Package that serving does not need -> the extra of pyproject.toml that installs it."""


@quiet_pipe()
@whole_words()
def run_command(command: Callable[[], int]) -> int:
    """Call `command` and return its exit code. A StagesError becomes one line on stderr and its own exit code;
    so do a package that `make serve` leaves out, and a full disk. Ctrl-C ends silently with 130, a closed output pipe with 0."""
    try:
        if sys.platform == "win32":
            raise ConfigError("Windows lacks the sockets and signals that this needs; run it in WSL 2, as on Linux")
        return command()
    except StagesError as error:
        # it may quote a model's file
        complain("stages", printable(" ".join(str(error).split())))
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        hint = f"pip install --editable '.[{EXTRAS[error.name]}]' adds it, make venv everything"
        complain("stages", f"this needs {error.name}, which is not installed; {hint}")
        return StagesError.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_full_disk(error):
            raise
        hint = "see which disk is full or cannot be written, or name another folder for temporary files with the variable TMPDIR"
        complain("stages", f"{printable(str(error))}; {hint}")
        return 1


def _is_full_disk(error: Exception) -> bool:
    """Is a disk full or read-only? ZMQError has an errno too, and tempfile raises FileNotFoundError when no folder can be written."""
    no_folder_left = isinstance(error, FileNotFoundError) and error.filename is None
    return no_folder_left or getattr(error, "errno", None) in FULL_DISK


class CLISubcommand(ABC):
    """One subcommand of a program. It imports what it needs in `cmd`, so that its `--help` stays quick."""

    @abstractmethod
    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """Add the command's own flags."""

    @abstractmethod
    def cmd(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code. Raises StagesError for what the user can fix."""


MakeParser = Callable[[str | None], FlexibleArgumentParser]


def run_program(
    program: str, commands: Collection[str], make_parser: MakeParser, argv: Sequence[str] | None, traced: Collection[str],
) -> int:  # fmt: skip
    """Phase 1 of the walk, of `stages` and of `python -m stage02_server`: environment, parser, dispatch. Returns the exit code.

    `make_parser(command)` adds only that command's flags, and sets `dispatch_function` to its `cmd`; None: no command was
    named. The commands in `traced` open a trace of the process, which becomes the API server.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_command(lambda: _dispatch(program, commands, make_parser, words, traced))
    finally:
        trace.close()


def _dispatch(
    program: str, commands: Collection[str], make_parser: MakeParser, words: list[str], traced: Collection[str]
) -> int:
    chosen = words[0] if words and not words[0].startswith("-") else None
    if chosen in traced:  # whether to record is itself a flag: until it is parsed, events are held
        trace.hold("APIServer")
    if trace.on:
        trace.emit("cli.main", argv=redact_argv(words))
    env = cli_env_setup()
    if trace.on:
        trace.emit("cli.env_setup", set=redact_values(env))
    if chosen is not None and chosen not in commands:
        raise ConfigError(f"no command {chosen!r}{did_you_mean(chosen, commands)}; see {program} --help")
    parser = make_parser(chosen)
    if trace.on:
        trace.emit("cli.parser_created", program=program, subcommands=list(commands))
    # Without a command only the first flag counts: argparse would take the value of an unknown one for the command.
    args = parser.parse_args(words if chosen is not None else words[:1])
    if trace.on:
        trace.emit("cli.parsed", subparser=str(args.subparser))
    if args.subparser is None:
        parser.print_help(sys.stderr)
        return ConfigError.exit_code
    if trace.on:
        trace.emit("cli.dispatch", function=args.dispatch_function.__qualname__)
    return args.dispatch_function(args)
