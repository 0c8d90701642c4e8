"""`python tests/support/fork_server.py DESCRIPTOR PADDING`: forks processes that have the libraries loaded, for the process that started it.

Started by `fork_start.py`, not by hand. `fork_child.py` has what it does. This file only sees which module brings which others when it is
imported, and so imports nothing before.
"""

import builtins
import importlib
import sys


class Imports:
    """From now on, until `end`: who imports whom."""

    def __init__(self) -> None:
        self._brought: dict[str, set[str]] = {}
        self._import, self._import_module = builtins.__import__, importlib.import_module
        builtins.__import__ = self._watched
        importlib.import_module = self._watched_module

    def end(self) -> dict[str, set[str]]:
        """Module -> the modules that its import brings. One that no statement named, as a compiled package makes it, comes with its parent;
        a package with what is in it."""
        builtins.__import__, importlib.import_module = self._import, self._import_module
        named = {name for names in self._brought.values() for name in names}
        packages = {name[:dot] for name in named for dot, letter in enumerate(name) if letter == "."}
        for name in sys.modules:
            parent = name.rpartition(".")[0]
            if parent and name not in named and name not in packages:
                self._note(parent, name)
        return self._brought

    def _watched(self, name, globals=None, locals=None, fromlist=(), level=0):  # type: ignore[no-untyped-def]
        found = self._import(name, globals, locals, fromlist, level)
        if level:
            package = globals.get("__package__") or globals["__name__"].rpartition(".")[0]
            base = package.rsplit(".", level - 1)[0]
            name = f"{base}.{name}" if name else base
        self._note(self._importing(), name, *(f"{name}.{each}" for each in fromlist or ()))
        return found

    def _watched_module(self, name, package=None):  # type: ignore[no-untyped-def]
        found = self._import_module(name, package)
        self._note(self._importing(), found.__name__)
        return found

    @staticmethod
    def _importing() -> str:
        """The module that is being imported, perhaps by a call of another module's function."""
        frame = sys._getframe(2)
        while frame is not None and not getattr(frame.f_globals.get("__spec__"), "_initializing", False):
            frame = frame.f_back  # type: ignore[assignment]
        return "" if frame is None else frame.f_globals["__name__"]

    def _note(self, importer: str, *names: str) -> None:
        self._brought.setdefault(importer, set()).update(names)


if __name__ == "__main__":
    before, imports = {*sys.modules}, Imports()
    importlib.import_module("fork_child").main(before, imports.end)
