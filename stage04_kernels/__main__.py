"""The command line of stage 4: check, compile, bench, roofline. vLLM has no such commands; its checks are in its tests."""

from __future__ import annotations

import sys

from stage04_kernels.attention import load

COMMANDS = "stage04_kernels.lab.commands:main"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Exits with 2 if the command line is wrong."""
    try:
        run = load(COMMANDS)
    except ImportError as error:
        print(f"python -m stage04_kernels: its commands are not installed: {error}", file=sys.stderr)
        return 2
    return int(run(argv))


if __name__ == "__main__":
    sys.exit(main())
