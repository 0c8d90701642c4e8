"""Compile native.cpp for the processor at hand, once, and load it.

The file uses no torch header, and is called through ctypes: so it compiles in five seconds, where an extension of torch's takes a
minute. The library is kept in the user's cache; its name is a hash of all that it depends on, so it is never stale.
Imports no torch: a command line may ask `problem` whether there is a native path.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
VARIANTS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: not every compiler has OpenMP, nor the same name for the processor at hand."""
SECONDS = 120


class NativeError(ImportError):
    """There is no native library on this machine; the message says why."""


def cache_folder() -> Path:
    """Where compiled libraries are kept; VLLM_CACHE_ROOT as in vLLM, else the user's cache."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-in-stages"


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first that is found."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]))), None)


def _processor() -> str:
    """What the compiler's choice of instructions depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    )


def _build(command: str, target: Path) -> None:
    """Compile into a file beside the target, then rename: another process may do the same. Raises NativeError."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            for variant in VARIANTS:
                arguments = [command, *FLAGS, *variant, str(SOURCE), "-o", str(made)]
                done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, check=False)
                if done.returncode == 0:
                    os.replace(made, target)
                    return
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command} could not compile {SOURCE.name}: {error}") from error
    reason = next((line for line in done.stderr.splitlines() if "error" in line), "no error message")
    raise NativeError(f"{command} could not compile {SOURCE.name}: {reason}")


@functools.cache
def library_path() -> Path:
    """The compiled library; the first call on a machine takes the compiler's five seconds. Raises NativeError."""
    command = compiler()
    if command is None:
        raise NativeError("no C++ compiler was found (c++, g++, clang++ or $CXX)")
    depends = (SOURCE.read_text(), command, str(os.stat(command).st_mtime_ns), repr(FLAGS + VARIANTS), _processor())
    name = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:16]
    target = cache_folder() / "native" / f"{name}.so"
    if not target.exists():
        _build(command, target)
    return target


def problem() -> str | None:
    """Why there is no native path on this machine; None if there is one."""
    try:
        library_path()
    except NativeError as error:
        return str(error)
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library in this process. Raises NativeError."""
    try:
        return ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise NativeError(f"the compiled library cannot be loaded: {error}") from error


def limit_threads(most: int | None) -> None:
    """From now on no function of native.cpp uses more threads than this, whatever it is told, also in recorded calls; None: no limit. The numbers stay the
    same to the last bit. Raises NativeError."""
    load_library().limit_threads(2**31 - 1 if most is None else most)


TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_long, "f": ctypes.c_float}


class _Recording(threading.local):
    """What this thread calls goes to `to` instead of native.cpp: a function's name, the letters of its arguments, the arguments (graph.py)."""

    to: Callable[[str, str, tuple[Any, ...]], None] | None = None


recording = _Recording()


@functools.cache
def function(name: str, arguments: str) -> Callable[..., None]:
    """A function of native.cpp. `arguments` has a letter for each: p pointer (None is null), i int, l long, f float.

    The caller keeps what the pointers point to alive and contiguous. Other Python threads run during the call. Raises NativeError.
    """
    found = getattr(load_library(), name)
    found.argtypes, found.restype = [TYPES[letter] for letter in arguments], None

    def call(*values: Any) -> None:
        if recording.to is None:
            found(*values)
        else:
            recording.to(name, arguments, values)

    return call
