"""How features add to the walk's types: by name, and as mixins.

A feature's manifest names its parts as texts, "module:attribute", and declares settings and fields as plain classes. The walk's types are
put together from these once, when they are imported. vLLM puts all fields into one class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, get_origin, get_type_hints

import msgspec

from stage03_engine.errors import ConfigError


def is_there(module: str) -> bool:
    """Can `module` be imported? False if it, or a folder above it, was deleted."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None  # None: a folder that Python files were deleted from


def load(name: str) -> Any:
    """What `module:attribute` names. Raises ConfigError if there is no such module or attribute, and ImportError if the module needs
    another one that is not there."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if is_there(module):
            raise
        raise ConfigError(f"{name} is named, but not there: {error}") from error
    except AttributeError as error:
        if attribute in str(error):
            raise ConfigError(f"{name} is named, but not there: {error}") from error
        raise


EACH = {"detect", "resolve", "check", "tasks", "hooks", "kv_per_token", "memory_rows", "start_rows", "of_later_engine"}
"""Methods that any mixin may have: `each` calls them all."""


def each(kind: type, method: str) -> list[Callable[..., Any]]:
    """`method` of each mixin of `kind` that defines it; `kind.method` alone would be the first one's."""
    return [getattr(part, method) for part in kind.__mro__[2:] if method in vars(part)]


def gathered(kind: type, method: str, *args: Any) -> dict[str, Any]:
    """What `method` of each mixin of `kind` returns for these arguments, merged. Raises ConfigError if two decide about the same
    setting: their order would decide which one counts."""
    found: dict[str, Any] = {}
    for function in each(kind, method):
        more = function(*args)
        if both := found.keys() & more.keys():
            raise ConfigError(f"two of these settings decide about {min(both)}: leave out one of them")
        found |= more
    return found


def attributes(part: type) -> set[str]:
    """The names that a class and those that it inherits from give to their objects, without those of Python itself."""
    return {name for kind in part.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}


def struct_of(base: type[msgspec.Struct], parts: Sequence[type]) -> Any:
    """`base` with the fields and methods of `parts`, for msgspec, which cannot inherit from two Structs.

    A part is a plain class with `__slots__ = ()`, annotated fields with defaults, and perhaps methods. Its method
    `check(self)`, if any, raises what `base` would raise; the table `CHECKS` holds it beside the defaults of the part's
    fields, and `base.__post_init__` calls it if a field has another value. The `HOOKS` of the parts become one table.
    """
    fields, checks = [], []
    for part in parts:
        kinds = get_type_hints(part, include_extras=True)
        own = {name: kind for name, kind in kinds.items() if get_origin(kind) is not ClassVar}
        fields += [(name, kind, _default(getattr(part, name))) for name, kind in own.items()]
        if hasattr(part, "check"):
            checks.append(({name: getattr(part, name) for name in own}, part.check))
    methods = {
        name: value
        for part in parts
        for name, value in vars(part).items()
        if not name.startswith("__")
        and name != "check"
        and (callable(value) or isinstance(value, (property, classmethod)))
    }
    hooks = {field: seams for part in (base, *parts) for field, seams in getattr(part, "HOOKS", {}).items()}
    namespace = {**methods, "HOOKS": hooks, "CHECKS": checks, "__doc__": base.__doc__}
    config = base.__struct_config__
    return msgspec.defstruct(
        base.__name__, fields, bases=(base,), namespace=namespace, module=base.__module__,
        frozen=config.frozen, kw_only=True, omit_defaults=config.omit_defaults,
    )  # fmt: skip


def _default(value: Any) -> Any:
    return msgspec.field(default_factory=type(value)) if isinstance(value, (list, dict, set)) else value
