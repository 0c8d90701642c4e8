"""What a fork server has loaded before it forks: libraries, out of sight until a process imports them.

A forked process must look as if it had just been started. So everything that was imported is taken out of `sys.modules`, and a finder
puts it back: a module, and what its own import brings, when somebody imports it. Of the project, what every server imports is loaded, and
left out where a process might find another.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.abc
import importlib.util
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec  # not by its package, of which a fork knows less
from types import ModuleType

LIBRARIES = [
    "msgspec",
    "msgspec.json",
    "msgspec.msgpack",
    "zmq",
    "zmq.asyncio",
    "psutil",
    "jinja2",
    "jinja2.sandbox",
    "yaml",
    "tokenizers",
    "pydantic",
    "pydantic.networks",
    "fastapi",
    "fastapi.openapi.utils",
    "fastapi.responses",
    "fastapi.exceptions",
    "starlette.middleware.cors",
    "starlette.staticfiles",
    "python_multipart",
    "uvicorn",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "httptools",
    "uvloop",
    "httpx",
    "numpy",
    "safetensors",
    "torch",
    "torch.nn.functional",
    "safetensors.torch",
    "setproctitle",
    "llguidance",
    "asyncio",
    "concurrent.futures.thread",
    "concurrent.futures.process",
    "multiprocessing.shared_memory",
    "torch.distributed",
    "torch.utils.data",
    "torch.profiler",
    "tempfile",
    "argparse",
    "logging",
    "shutil",
    "uuid",
    "runpy",
    "email.parser",
]
PROJECT = [
    "stage03_engine.core.model_runner",
    "stage03_engine.core.engine_core_proc",
    "stage02_server.serve",
    "stage02_server.api_server",
    "stage02_server.routes",
    "stage02_server.launcher",
    "stage02_server.lifecycle",
    "stage02_server.middleware",
    "stage02_server.serving_chat",
    "stage02_server.serving_completion",
    "stage03_engine.frontend.async_llm",
    "stage03_engine.frontend.engine_process",
]
"""What a server and its engine import of the project in any case, with what these import."""
PACKAGES = {"stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "stagetrace"}
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INSTALLED = (".dist-info", ".egg-info", ".egg-link")
"""How the names of files end by which Python finds what installed packages add."""

READ_BY_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "LD_", "MALLOC_", "GLIBC_",
                     "PYTHON", "LC_", "LANG", "HF_", "NUMPY_", "NPY_", "SSL_", "OPENSSL_", "DNNL_", "ONEDNN_", "LLVM_", "TQDM_", "tqdm_")  # fmt: skip
"""How the names of variables begin that compiled code reads when it is loaded, and some that are read before Python runs."""
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "PYTHONPATH")
"""How some of these begin that are read later: when ranks meet, or by a fork server itself."""

LAZY = {"anyio"}
"""Packages that import a module when somebody asks for one of its names, and keep the name: once loaded, nobody imports the module again."""

CUSTOM = {"sitecustomize", "usercustomize"}  # what Python imports first
OURS = {"fork_child", "fork_image", "fork_start"}


class Reads:
    """Which variables of the environment are read while the libraries are imported."""

    def __enter__(self) -> set[str]:
        self.names: set[str] = set()
        names, kind = self.names, type(os.environ)
        self._kind = kind

        class Watched(kind):  # type: ignore[misc, valid-type]
            def __getitem__(self, name: str) -> str:
                names.add(name)
                return kind.__getitem__(self, name)

            def __contains__(self, name: object) -> bool:
                names.add(str(name))
                return kind.__contains__(self, name)

        os.environ.__class__ = Watched
        return self.names

    def __exit__(self, *_: object) -> None:
        os.environ.__class__ = self._kind


MAIN_AGAIN = "__mp_main__"
"""How multiprocessing calls the main module, which each process has its own of."""


class Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are loaded and out of sight.

    Invariant: a module is in `sys.modules` exactly if this process has imported it, itself or through another, as far as names go that
    import statements contain.
    """

    def __init__(self, before: set[str], brought: Mapping[str, set[str]]) -> None:
        """Hide what is loaded and was not `before`."""
        self._modules = {name: module for name, module in sys.modules.items() if name not in before}
        self._modules.pop(MAIN_AGAIN, None)
        self._brought, self._lock = brought, threading.Lock()
        self._specs = {name: getattr(module, "__spec__", None) for name, module in self._modules.items()}
        self._attributes: dict[str, ModuleType] = {}
        self._kept: list[ModuleType] = []  # what was forgotten is not taken apart
        for name in [*self._modules, MAIN_AGAIN]:
            sys.modules.pop(name, None)
        for name, module in self._modules.items():
            parent, _, last = name.rpartition(".")
            holder = self._modules.get(parent) or sys.modules.get(parent)
            imported = getattr(vars(module).get("__spec__"), "name", None) == name  # else somebody named it so himself
            if holder is not None and imported and vars(holder).get(last) is module:
                delattr(holder, last)
                self._attributes[name] = holder

    def _closure(self, name: str) -> Iterator[str]:
        waiting, seen = [name], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self._modules:
                yield name
                waiting.extend(self._brought.get(name, ()))
            if name in LAZY:
                waiting.extend(each for each in self._modules if each.startswith(f"{name}."))
            if parent := name.rpartition(".")[0]:
                waiting.append(parent)

    def forget(self, packages: set[str]) -> None:
        """Modules of these are imported afresh."""
        for name in [name for name in self._modules if name.partition(".")[0] in packages]:
            self._kept.append(self._modules.pop(name))

    def can_run(self, module: str) -> bool:
        """`python -m` reads the code of a module that is none of a package's, which this finder does not have."""
        return module not in self._modules or "__path__" in vars(self._modules[module])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None:
            return None
        spec = ModuleSpec(fullname, self, loader_state=module, is_package="__path__" in vars(module))
        real = self._specs[fullname]
        if real is not None:
            spec.origin, spec.has_location = real.origin, real.has_location
            spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert isinstance(spec.loader_state, ModuleType)
        return spec.loader_state

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.name
        with self._lock:
            for each in [*self._closure(name)]:
                sys.modules[each] = found = self._modules.pop(each)
                if each in self._attributes:
                    setattr(self._attributes[each], each.rpartition(".")[2], found)
        module.__spec__ = self._specs[name]


def import_project(own_folder: str) -> None:
    """Import what is named in PROJECT, if Python finds this copy of the project. `own_folder` is where the fork server's files lie,
    beside folders that are called as the stages are."""
    before = sys.path[:]
    sys.path[:] = [each for each in before if each != own_folder]
    try:
        found = [importlib.util.find_spec(name) for name in sorted(PACKAGES)]
        if all(each and str(each.origin).startswith(ROOT + os.sep) for each in found):
            for name in PROJECT:
                importlib.import_module(name)
    finally:
        sys.path[:] = before


class Image:
    """A process with the libraries loaded and hidden, and no thread. `names` are what it read of its environment."""

    def __init__(self, before: set[str], imports: Callable[[], dict[str, set[str]]]) -> None:
        """`before` is what Python loads in any case, `imports` tells, at the end, who imports whom."""
        # torch brings it: looks through all variables for those that begin with its name
        importlib.import_module("tqdm")
        with Reads() as self.names:
            for name in LIBRARIES:
                try:
                    importlib.import_module(name)
                except ImportError:
                    pass  # an extra that is not installed: whoever imports it learns so
        with Reads() as self._read_by_the_project:
            import_project(sys.path[0])
        self._titles = sys.modules.get("setproctitle")
        if self._titles is not None:
            self._titles.getproctitle()  # it looks for the command line in memory, which is as Python knows it only now
        self.environment = dict(os.environ)
        self._numpy, self._torch = sys.modules.get("numpy.random.mtrand"), sys.modules.get("torch")
        packages = {name.partition(".")[0] for name in sys.modules if name not in before}
        self._own = packages - PACKAGES - OURS | CUSTOM
        self._hidden = hidden = Hidden(before, imports())
        sys.meta_path.insert(0, hidden)
        # what was never shown is not taken apart at the end of the process either
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(hidden))
        gc.collect()
        gc.freeze()

    def leave_out_the_project(
        self, command: tuple[str, str], environment: Mapping[str, str], folders: Sequence[str]
    ) -> None:
        """In a forked process: it imports the project afresh, unless it would find what is loaded, before any code but the project's runs.

        `command` is `-m` and a module, or another kind of program. `folders`: where it looks for modules first.
        """
        kind, what = command
        variables = self._read_by_the_project
        alike = all(environment.get(name) == self.environment.get(name) for name in variables)
        here = ROOT in folders or ROOT not in self.environment.get("PYTHONPATH", "").split(os.pathsep)
        others = [each for each in folders if each not in (ROOT, os.path.join(ROOT, "trace"))]
        more = any(name in PACKAGES or name.endswith(INSTALLED) for each in others for name in os.listdir(each))
        if kind != "-m" or not alike or not here or more or not self._hidden.can_run(what):
            self._hidden.forget(PACKAGES)

    def seed(self) -> None:
        """Begin random numbers anew, as in each new process."""
        random.seed()
        if self._numpy is not None:
            self._numpy.seed()
        if self._torch is not None:
            self._torch.default_generator.seed()

    def title_is(self, command: str) -> None:
        """What the library for titles shall say until somebody sets one."""
        if (titles := self._titles) is None:
            return
        get, put = titles.getproctitle, titles.setproctitle

        def first(title: str) -> None:
            titles.getproctitle, titles.setproctitle = get, put  # type: ignore[attr-defined]
            put(title)

        titles.getproctitle, titles.setproctitle = (lambda: command), first  # type: ignore[attr-defined]

    def fits(self, environment: Mapping[str, str], folders: Sequence[str], sets_threads: bool) -> bool:
        """Would a process with this environment have loaded the same libraries in the same way? `folders`: where it looks for modules first.
        `sets_threads`: it tells torch how many threads compute, whatever the environment says."""
        watched = {name for name in {*self.environment, *environment} if name.startswith(READ_BY_LIBRARIES)}
        watched = {name for name in watched if not name.startswith(READ_LATER)} | self.names
        if sets_threads:
            watched.discard("OMP_NUM_THREADS")
        alike = all(environment.get(name) == self.environment.get(name) for name in watched)
        return alike and not any(name.partition(".")[0] in self._own for each in folders for name in os.listdir(each))
