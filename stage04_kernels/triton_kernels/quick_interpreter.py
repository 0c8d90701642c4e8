"""Triton's interpreter at less cost: what it works out anew for each launch and each call of a device function is worked out once.

Before a kernel runs, the interpreter looks through everything that `triton.language` has and puts its own function in each one's place; afterwards
it puts the old ones back. It does so too for each function that a kernel calls, where all is in place already. Half of an interpreted
kernel's time goes into looking. Here the list of what is exchanged is made once, and exchanged once for a launch. What a kernel computes stays the same.

Imported for its effect, where kernels are interpreted. Another version of Triton, built in another way, is left as it is.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

MISSING = object()


class Exchange:
    """Everything that the interpreter exchanges in `triton.language`.

    Invariant: its own functions are in place exactly while a launch runs, in whatever thread.
    """

    def __init__(self) -> None:
        self._exchanged: list[
            tuple[Any, str, Any, Any]
        ] = []  # of what, which attribute, what stood there, what comes there
        self._launches = 0
        self._lock = threading.Lock()

    def __call__(self, function: Any) -> Exchange:
        """In the place of the interpreter's `_patch_lang`. Within a launch, for a function that the kernel calls, all is done."""
        if sys._getframe(1).f_code is _DEVICE_CALL:
            if self._launches == 0:  # a device function that no kernel calls
                _patch_lang(function)
        else:
            with self._lock:
                self._exchanged = self._exchanged or found()
                if self._launches == 0:
                    for holder, name, _, ours in self._exchanged:
                        setattr(holder, name, ours)
                self._launches += 1
        return self

    def restore(self) -> None:
        """The end of a launch."""
        with self._lock:
            self._launches -= 1
            if self._launches == 0:
                for holder, name, before, _ in self._exchanged:
                    put(holder, name, before)


def found() -> list[tuple[Any, str, Any, Any]]:
    """What the interpreter itself exchanges, for a kernel whose file knows the language by both its names: functions of Triton's own library do."""
    scope = _patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    exchanged = {}
    for holder, name, before in reversed(scope._changes):  # the first change of several knows what stood there
        exchanged[id(holder), name] = (holder, name, MISSING if inherits(holder, name, before) else before)
    found = [(*what, vars(what[0])[what[1]]) for what in exchanged.values()]
    scope._changes.clear()
    for holder, name, before, _ in found:
        put(holder, name, before)
    return found


def inherits(holder: Any, name: str, value: Any) -> bool:
    """Is it there by a class above, or not at all? The interpreter would put it into the class itself."""
    above = getattr(holder, "__mro__", ())[1:]
    return value is next((vars(each)[name] for each in above if name in vars(each)), interpreter._MISSING)


def put(holder: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def np_dtype(kind: Any) -> np.dtype[Any]:
    """The NumPy type in which the interpreter keeps numbers of a Triton type: for numbers it makes a table of all, each time."""
    number = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if isinstance(number, tl.pointer_type):
        return _get_np_dtype(kind)
    if number.name not in _np_dtypes:
        _np_dtypes[number.name] = _get_np_dtype(number)
    return _np_dtypes[number.name]


_np_dtypes: dict[str, np.dtype[Any]] = {}
try:
    _patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    _DEVICE_CALL = interpreter.InterpretedFunction.__call__.__code__
    interpreter._LangPatchScope, interpreter._MISSING  # noqa: B018 - whose list `found` reads
except AttributeError:
    pass
else:
    interpreter._patch_lang, interpreter._get_np_dtype = Exchange(), np_dtype
