"""Read a submission before it runs: whoever grades it lets it run only if it is written in the part of Python that an exercise needs.

A submission shares its process with its judge, and in Python whoever can reach one object can reach all. So what reaches, or changes, things
that nobody gave it is refused by its name: importing what its starter does not, looking into frames and classes, running text as code, and
changing what it imports. `check` judges such a file all the same, and says what a grader will.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from stage01_cli.tools.course.exercises import Exercise, parsed
from stage01_cli.tools.course.own import definitions

COMPUTES = frozenset({
    "__future__", "abc", "array", "asyncio", "base64", "bisect", "codecs", "collections", "collections.abc", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "logging",
    "math", "numbers", "operator", "random", "re", "statistics", "string", "struct", "textwrap", "time", "typing", "unicodedata", "zlib",
})  # fmt: skip
"""Modules of Python that a submission may import: they compute, and reach nothing."""
MESSAGES = frozenset({
    "stage02_server.errors", "stage02_server.protocol", "stage02_server.protocol_types", "stage02_server.streaming",
    "stage03_engine.core.kv_cache_manager", "stage03_engine.core.request", "stage03_engine.core.sched_output", "stage03_engine.errors",
    "stage03_engine.messages", "stage03_engine.model_shape", "stage03_engine.outputs", "stage03_engine.sampling_params",
    "stage04_kernels.attention", "stage04_kernels.attention_metadata", "stagetrace", "stagetrace.event",
})  # fmt: skip
"""Modules of the project from which a submission may take names: what the parts tell each other."""
TENSORS = frozenset({"torch", "numpy"})

RUNS_TEXT = frozenset({"eval", "exec", "compile", "__import__"})
REACHES = RUNS_TEXT | {
    "open", "input", "breakpoint", "globals", "locals", "vars", "setattr", "delattr", "exit", "quit", "help", "memoryview",
}  # fmt: skip
"""Names of Python's own that a submission does not use."""
NEVER = frozenset({"os", "sys", "subprocess", "importlib", "builtins", "bltns", "inspect", "gc", "ctypes"})
"""Modules of Python that a submission does not reach, by whatever way."""
MODULES = NEVER | frozenset({
    "types", "signal", "socket", "shutil", "pathlib",
    "io", "tempfile", "multiprocessing", "threading", "atexit", "traceback", "linecache", "pickle", "marshal", "pytest", "hypothesis",
    "faulthandler", "mmap", "posix", "unittest", "runpy", "pkgutil", "site", "pdb", "code", "copyreg", "weakref", "glob", "sysconfig",
    "platform", "resource", "fcntl", "select", "selectors", "cffi", "psutil", "conftest", "judging", "warnings", "tokenize", "ast", "dis",
})  # fmt: skip
"""Modules that others hold, so that `asyncio.threading` would be one; elsewhere these are ordinary words."""
LOOKS_INSIDE = frozenset({
    "f_back", "f_globals", "f_locals", "f_builtins", "f_code", "tb_frame", "tb_next", "gi_frame", "gi_code", "cr_frame", "cr_code",
    "ag_frame", "ag_code", "mro", "attrgetter", "methodcaller", "make_dataclass", "get_type_hints", "ForwardRef", "as_strided", "hub",
    "from_file", "fromfile", "memmap", "ctypeslib", "CompilationUnit", "import_class",
})  # fmt: skip
"""Attributes by which one gets from an object to what it was not given for."""
OF_TENSORS = frozenset({
    "load", "save", "jit", "compile", "ops", "package", "utils", "serialization", "library", "overrides", "lib", "f2py", "testing", "core",
    "distutils", "classes", "savez", "savez_compressed", "savetxt", "loadtxt", "genfromtxt", "DataSource", "set_default_dtype",
})  # fmt: skip
"""Of torch and numpy: what reads and writes files, runs text, or changes the library."""
DEFINED = frozenset({
    "__init__", "__post_init__", "__repr__", "__str__", "__len__", "__iter__", "__next__", "__contains__", "__getitem__", "__setitem__",
    "__delitem__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__aiter__", "__anext__", "__call__", "__missing__",
})  # fmt: skip
"""Methods with such names that a submission may define. Not __eq__ and its like: a judge compares."""
NAMED = frozenset({"__name__", "__all__", "__slots__", "__doc__", "__future__", "__main__"})


def refusals(exercise: Exercise, path: Path) -> list[str]:
    """A sentence for each thing in the file that no grader lets run, by its line; none for a file that is not Python, since nothing of that
    runs."""
    try:
        tree = parsed(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    reader = Reader(exercise, tree)
    try:
        found = sorted(set(reader.read(tree)))
    except RecursionError:
        return ["The file is nested too deeply to be read."]
    return [f"Line {line}: {text}" for line, text in found]


class Reader:
    """Goes through a file once."""

    def __init__(self, exercise: Exercise, tree: ast.Module) -> None:
        starter = parsed(exercise.starter.read_bytes())
        self.given = set(_imports(starter))
        roots = {module.partition(".")[0] for module, _ in self.given}
        self.packages = {root for root in roots if not root.startswith("stage")} | (
            TENSORS if exercise.tensors else set()
        )
        self.defined = DEFINED | {
            each.name for part in definitions(starter).classes.values() for each in _functions(part)
        }
        bound = {
            (alias.asname or alias.name).partition(".")[0]: isinstance(node, ast.Import)
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        self.imported, self.modules = set(bound), {name for name, is_module in bound.items() if is_module}
        self.texts = {id(text) for text in _docstrings(tree)}
        self.roots: set[int] = set()  # names that only stand before a point

    def read(self, tree: ast.AST) -> Iterator[tuple[int, str]]:
        """(line, sentence) of what is refused."""
        nodes = list(ast.walk(tree))
        self.roots = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            line = getattr(node, "lineno", 0)
            yield from ((line, text) for text in self.look(node))

    def look(self, node: ast.AST) -> Iterator[str]:
        """What is wrong with one node."""
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from (
                    self.imports(module, name) for module, name in _imports_of(node) if not self.may(module, name)
                )
            case ast.Name():
                yield from self.name(node)
            case ast.Attribute():
                yield from self.attribute(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _special(node.name) and node.name not in self.defined:
                yield f"{node.name} may not be defined: your judge would be told what your objects like."
            case ast.Call(func=ast.Name(id="type"), args=arguments) if len(arguments) != 1:
                yield "type() may say what something is, but not make a class."
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, name, *_]):
                if not isinstance(name, ast.Constant) or not isinstance(name.value, str) or self.closed(name.value):
                    yield "getattr() takes only a name that is written there, and that may stand behind a point."
            case ast.MatchClass(kwd_attrs=names):
                yield from (f"{name} may not be looked at." for name in names if self.closed(name))
            case ast.Constant(value=str() as text) if id(node) not in self.texts and text not in NAMED:
                if "__" in text or any(f"{name}(" in text for name in REACHES):
                    yield "a text that names Python's insides, or is code, may not be in the file."
        for target in _targets(node):
            if (root := _root(target)) in self.imported | {"type"}:
                yield f"{root} is changed; what a file imports, and the classes of others, stay as they are."

    def may(self, module: str, name: str) -> bool:
        """Is this import allowed? `name` is empty for the module itself."""
        if (module, name) in self.given:
            return True
        if name.startswith("_") or name == "*" or name in MODULES or self.closed(name):
            return False
        root = module.partition(".")[0]
        if root in self.packages:
            return not any(each in MODULES or self.closed(each) or each.startswith("_") for each in module.split("."))
        return module in COMPUTES or (bool(name) and module in MESSAGES)

    def imports(self, module: str, name: str) -> str:
        """The sentence for an import that is not."""
        what = f"{name} from {module}" if name else module
        return (
            f"it imports {what}; a file may import what its starter does, and what computes (math, collections, ...)."
        )

    def name(self, node: ast.Name) -> Iterator[str]:
        """A name that stands alone."""
        if node.id in REACHES or (_special(node.id) and node.id not in NAMED):
            yield f"{node.id} reaches beyond your part."
        elif node.id == "getattr" and isinstance(node.ctx, ast.Store):
            yield "getattr is Python's."
        elif node.id in self.modules and id(node) not in self.roots:
            yield f"the module {node.id} may only stand before a point."

    def attribute(self, node: ast.Attribute) -> Iterator[str]:
        """What stands behind a point."""
        root = _root(node)
        if self.closed(node.attr):
            yield f"{node.attr} reaches beyond your part."
        elif root in self.modules:
            name = node.attr
            if name.startswith("_") or name in MODULES or (name in REACHES and root != "re"):
                yield f"{root}.{name} reaches beyond your part."
            elif root in TENSORS | {"np"} and name in OF_TENSORS:
                yield f"{root}.{name} reads files, runs text or changes the library."

    def closed(self, name: str) -> bool:
        """May nobody look at an attribute of this name?"""
        return name in NEVER or name in LOOKS_INSIDE or (_special(name) and name not in self.defined | NAMED)


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _functions(part: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (each for each in part.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports_of(node)


def _imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        yield (alias.name, "") if isinstance(node, ast.Import) else ("." * node.level + (node.module or ""), alias.name)


def _docstrings(tree: ast.AST) -> Iterator[ast.expr]:
    """Texts that stand alone: they do nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What an assignment, a loop or `del` changes: attributes and entries."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            found = list(targets)
        case (
            ast.AugAssign(target=target)
            | ast.AnnAssign(target=target)
            | ast.For(target=target)
            | ast.AsyncFor(target=target)
        ):
            found = [target]
        case ast.withitem(optional_vars=ast.expr() as target):
            found = [target]
        case _:
            found = []
    for target in found:
        yield from (
            each
            for each in ast.walk(target)
            if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load)
        )


def _root(node: ast.AST) -> str:
    """The name at the beginning of `a.b[c].d`, also inside of `type(a.b)`; empty if it begins with something else."""
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case ast.Call(func=ast.Name(id="type" | "super"), args=[inner, *_]):
                return "type"
            case ast.Name(id=name):
                return name
            case _:
                return ""
