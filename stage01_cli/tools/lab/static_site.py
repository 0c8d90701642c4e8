"""`stages lab --static DIR`: the laboratory as a folder that any web server can serve, and that needs none of ours.

The browser runs Pyodide, which is CPython compiled to WebAssembly, and in it the very files that simulate here. Pyodide (npm) and
msgspec's wheel for it (the package index) are not part of the project: they are fetched when the folder is made, or taken from
`--pyodide`. The page itself then loads nothing from anywhere else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from stage01_cli.tools.lab.page import build_page, read_static
from stage03_engine.errors import ConfigError

PYODIDE = "pyodide@314.0.7"  # Python 3.14
WHEELS_FOR = (
    "--platform",
    "pyemscripten_2026_0_wasm32",
    "--python-version",
    "314",
    "--implementation",
    "cp",
    "--abi",
    "cp314",
)
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
WHEEL = "msgspec-*wasm32.whl"
LISTS_SOURCES = """
import sys
import stage01_cli.tools.lab.in_browser
from stage01_cli.tools.lab.simulate import simulate
import stage03_engine.core.features.debug.scheduler_checks
for policy in ("fcfs", "priority", "fair"):
    simulate({"settings": {"scheduling_policy": policy}, "requests": [{"id": "a"}]})
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in ("stage01_cli", "stage03_engine", "stagetrace") and getattr(module, "__file__", None):
        print(name, module.__file__)
"""
"""Prints what a simulation imports of the project: module and file."""


def write_site(folder: Path, pyodide: Path | None) -> Iterator[str]:
    """Write the folder, and yield a line for each thing done. Raises ConfigError if Pyodide cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    if pyodide is not None:
        _copy_runtime(pyodide, folder)
    elif not _has_runtime(folder):
        yield f"fetching {PYODIDE} (npm) and msgspec for it (pip)"
        with tempfile.TemporaryDirectory(prefix="stages-lab-") as scratch:
            fetch(Path(scratch))
            _copy_runtime(Path(scratch), folder)
    count = _write_sources(folder / "stages.zip")
    wheel = next(folder.glob(WHEEL)).name
    page, _ = build_page({"mode": "static", "own": None, "wheel": wheel})
    (folder / "index.html").write_text(page, encoding="utf-8")
    (folder / "worker.js").write_text(read_static("worker.js"), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    yield f"wrote {folder} ({size / 1e6:.1f} MB, {count} files of the project)"
    yield f"look at it: python -m http.server --bind 127.0.0.1 --directory {folder}"


def _has_runtime(folder: Path) -> bool:
    return all((folder / "pyodide" / name).exists() for name in RUNTIME) and any(folder.glob(WHEEL))


def _copy_runtime(source: Path, folder: Path) -> None:
    """Copy Pyodide and the wheel out of a folder, wherever in it they lie."""
    found = {name: next(source.rglob(name), None) for name in (*RUNTIME, WHEEL)}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise ConfigError(
            f"{source} has no {missing[0]}: --pyodide is a folder with the npm package pyodide, unpacked, and a wheel of msgspec for it"
        )
    for old in folder.glob(WHEEL):
        old.unlink()
    (folder / "pyodide").mkdir(exist_ok=True)
    for name, path in found.items():
        assert path is not None
        shutil.copyfile(path, folder / path.name if name == WHEEL else folder / "pyodide" / name)


def fetch(folder: Path, packages: Sequence[str] = ("msgspec",)) -> None:
    """Get Pyodide and the wheels from their registries by the ordinary clients. Raises ConfigError if they cannot be had."""
    _run(["npm", "pack", PYODIDE, "--pack-destination", str(folder)], "npm")
    with tarfile.open(next(folder.glob("pyodide-*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *WHEELS_FOR]
    _run([*pip, "--dest", str(folder), *packages], "pip")


def _run(command: list[str], program: str) -> None:
    hint = "or give --pyodide a folder with the npm package pyodide, unpacked, and a wheel of msgspec for it"
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"{program} is needed to fetch Pyodide ({error.strerror}); install it, {hint}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"{program} could not fetch what is needed ({last}); try again with a network, {hint}")


def _write_sources(path: Path) -> int:
    """Zip the files of the project that a simulation imports; returns how many. A process of its own imports nothing else."""
    listed = subprocess.run([sys.executable, "-c", LISTS_SOURCES], capture_output=True, text=True, check=True).stdout
    modules = dict(line.split(" ", 1) for line in listed.splitlines())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in modules.items():
            parts = name.split(".")
            inside = "/".join(parts) + ("/__init__.py" if Path(file).name == "__init__.py" else ".py")
            archive.writestr(plain(("trace/" if parts[0] == "stagetrace" else "") + inside), Path(file).read_bytes())
    return len(modules)


def plain(name: str) -> zipfile.ZipInfo:
    """The same bytes whenever the folder is made."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info
