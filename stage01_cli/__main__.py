"""`python -m stage01_cli` is `stages`."""

import sys


def run() -> int:
    """The program `stages`: its exit code. Ctrl-C during the imports gives 130, and what they refuse one line, not a traceback."""
    try:
        from stage03_engine.args.command import run_command

        return run_command(_main)
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    from stage01_cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
