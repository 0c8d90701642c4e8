"""`python -m stage03_engine generate MODEL PROMPT`: the engine alone, without HTTP.

The engine is imported in `_generate`: what its features, or an installed package's, refuse at import is one line, not a traceback.
"""

from __future__ import annotations

import sys

from stage03_engine.args.command import cli_env_setup, run_command
from stage03_engine.plugins import wanted
from stagetrace import trace


def main() -> int:
    """Returns the exit code."""
    cli_env_setup()
    trace.hold("LLM")
    return run_command(_generate)


def _generate() -> int:
    command = wanted("engine", "generate", "the engine without a server")
    return int(command(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
