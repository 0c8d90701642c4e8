"""`python tests/support/parts.py`: fetches what some tests need and the project does not install, into `.venv/parts`, for `make test-all`.

Pyodide (npm, and wheels for it) for the pages that run Python in a browser; clients that others wrote (pip); and an environment of its own for
frameworks for agents and for Ray, which need older versions than `constraints.txt` has: its Python runs what follows, `-m pytest ...`. What cannot be fetched is
said, and its tests are skipped, with the reason at the end of the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / ".venv" / "parts"
PYODIDE, AGENTS = PARTS / "pyodide", PARTS / "agents"
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def pyodide_folder() -> Path | None:
    """Where Pyodide and its wheels are: PYODIDE_DIR, or what was fetched. None if there is none."""
    if given := os.environ.get("PYODIDE_DIR"):
        return Path(given)
    return PYODIDE if PYODIDE.is_dir() else None


def fetch_pyodide() -> None:
    from stage01_cli.tools.book.exercise_page import requirements
    from stage01_cli.tools.lab.static_site import fetch

    scratch = PYODIDE.with_suffix(".new")
    scratch.mkdir(parents=True, exist_ok=True)
    fetch(scratch, requirements())
    scratch.rename(PYODIDE)


def extras(*names: str) -> list[str]:
    """The requirements of some extras."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [each for name in names for each in known[name]]


def install_clients() -> None:
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([sys.executable, *PIP, "--constraint", constraints, *extras("clients", "book")[:-1]], check=True)


def make_environment() -> None:
    """It sees the libraries of this one, unless it has another version of its own."""
    subprocess.run([sys.executable, "-m", "venv", str(AGENTS)], check=True)
    [packages] = AGENTS.glob("lib/python*/site-packages")
    shared = [str(ROOT), str(ROOT / "trace"), sysconfig.get_path("purelib")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    subprocess.run([str(AGENTS / "bin/python"), *PIP, *extras("agents", "ray")], check=True)
    (AGENTS / "is_whole").touch()


NEEDED: dict[str, tuple[Callable[[], None], Path]] = {
    "Pyodide": (fetch_pyodide, PYODIDE),
    "clients": (install_clients, PARTS / "clients"),
    "an environment for agents and Ray": (make_environment, AGENTS / "is_whole"),
}
"""What is fetched, how, and what is there when it has been."""


def main() -> None:
    for name, (get, proof) in NEEDED.items():
        if proof.exists():
            continue
        print(f"fetching {name}", flush=True)
        try:
            get()
            proof.parent.mkdir(parents=True, exist_ok=True)
            proof.touch()
        except Exception as error:  # whatever keeps it away, the other tests run
            print(f"{name} cannot be fetched, and its tests are skipped: {error}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif NEEDED["an environment for agents and Ray"][1].exists():
        os.execv(AGENTS / "bin/python", [str(AGENTS / "bin/python"), *sys.argv[1:]])
