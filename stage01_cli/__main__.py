"""`python -m stage01_cli` is `stages`."""

import sys


def run() -> int:
    """The program `stages`: its exit code. Ctrl-C during the imports gives 130, not a traceback."""
    try:
        from stage01_cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
