"""The rules of the house, read from the source: who may import whom, what stays light, how the trace is called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ["stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels"]
WALK = [*STAGES, "stage03_engine/args", "stage03_engine/frontend", "stage03_engine/core", "stage03_engine/core/models"]
# a room, but one that a reader of the walk comes through: it reaches others by seams too
BESIDE = ["stage03_engine/llm"]
MACHINERY = ["args", "frontend", "core", "models"]  # folders of stage 3 that the walk is built upon
NO_TORCH = [  # plain Python by contract: policy, and everything that the API process imports
    *[
        f"stage03_engine.core.{name}"
        for name in ("scheduler", "kv_cache_manager", "block_pool", "request", "sched_output")
    ],
    "stage03_engine.llm",
    "stage04_kernels.attention",
    "stage03_engine.frontend.async_llm",
    "stage02_server.api_server",
    "stage01_cli.main",
]


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), parsed(path)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, at any depth. The project has no relative imports (tested below)."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_imports_go_one_way() -> None:
    wrong = []
    for path, tree in sources(*STAGES, "trace"):
        room = path.parts[0]
        lower = STAGES[STAGES.index(room) :] if room in STAGES else []
        for line, name in imported(tree):
            top = name.split(".")[0]
            if top in STAGES and top not in lower:
                wrong.append(f"{path}:{line} imports {name}")
            assert not name.startswith("."), f"{path}:{line}: relative import"
    assert not wrong


def test_the_walk_imports_no_feature() -> None:
    """Not inside a function and not for a type either: only a lazy name, which is a text, leads from the walk to a room."""
    wrong = []
    for path, tree in sources(*STAGES):
        if str(path.parent) not in WALK + BESIDE:
            continue
        own = ".".join(path.parent.parts) if str(path.parent) in BESIDE else None
        for line, name in imported(tree):
            if own is not None and (name + ".").startswith(own + "."):
                continue
            inside = [folder.replace("/", ".") for folder in WALK if name.startswith(folder.replace("/", "."))]
            below = name.removeprefix(max(inside, key=len)).split(".")[1:] if inside else []
            if (
                below
                and ROOT.joinpath(*max(inside, key=len).split("."), below[0]).is_dir()
                and below[0] not in MACHINERY
            ):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong


def test_no_circle_of_imports() -> None:
    known = {module_of(path) for path, _ in sources(*STAGES, "trace")}
    graph = {
        module_of(path): {name for name in needed(tree) if name in known} - {module_of(path)}
        for path, tree in sources(*STAGES, "trace")
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts[1:] if path.parts[0] == "trace" else path.with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def needed(tree: ast.Module) -> Iterator[str]:
    """The modules that are imported when this one is: not inside functions, and not for types alone."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name for _, name in imported(ast.Module([node], [])))


def test_front_end_and_core_meet_only_in_the_messages() -> None:
    wrong = []
    for side, other in (("frontend", "core"), ("core", "frontend")):
        for path, tree in sources(f"stage03_engine/{side}"):
            wrong += [
                f"{path}:{line} imports {name}"
                for line, name in imported(tree)
                if name.startswith(f"stage03_engine.{other}")
            ]
    assert not wrong


def test_kernels_know_no_engine_and_models_no_backend() -> None:
    for path, tree in sources("stage04_kernels"):
        assert not [name for _, name in imported(tree) if name.startswith("stage03_engine")], path
    layers = ("stage04_kernels.features.rope", "stage04_kernels.layers")
    for path, tree in sources("stage03_engine/core/models"):
        kernels = {name for _, name in imported(tree) if name.startswith("stage04_kernels.")}
        assert kernels <= {
            "stage04_kernels.attention",
            "stage04_kernels.attention.get_backend",
            "stage04_kernels.attention.AttentionMetadata",
        } | {name for name in kernels if name.startswith(layers)}, path


def test_no_torch_is_imported() -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if found := {"torch", "transformers"} & set(sys.modules):
        sys.exit(f"{name} imports {found}")
"""
    result = subprocess.run([sys.executable, "-c", code, *NO_TORCH], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def is_emit(node: ast.AST) -> TypeGuard[ast.Call]:
    """Cheaper than `ast.unparse`, of which there would be a hundred thousand."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("trace"), attr="emit")):
            return True
    return False


def test_every_trace_call_is_guarded() -> None:
    """`trace.emit(...)` stands inside the body of `if trace.on ...:`, or is the first branch of `... if trace.on else ...`,
    so that a switched-off trace evaluates no arguments."""

    def is_guard(test: ast.expr) -> bool:
        first = test.values[0] if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else test
        return ast.unparse(first) == "trace.on"

    def walk(node: ast.AST, guarded: bool, path: Path) -> None:
        nonlocal calls
        if is_emit(node):
            calls += 1
            assert guarded, f"{path}:{node.lineno}: trace.emit without `if trace.on:`"
        inside_if = isinstance(node, ast.If | ast.IfExp) and is_guard(node.test)
        body = (node.body if isinstance(node.body, list) else [node.body]) if inside_if else []
        for child in ast.iter_child_nodes(node):
            walk(child, guarded or child in body, path)

    calls = 0
    for path, tree in sources(*STAGES):
        walk(tree, False, path)
    assert calls > 50


def test_emitted_events_are_in_the_vocabulary_with_these_arguments() -> None:
    from stagetrace import VOCABULARY

    own = {"ph", "req", "step", "cause"}
    seen: dict[str, set[str]] = {}
    for path, tree in sources(*STAGES):
        for node in nodes(tree):
            if is_emit(node):
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: the name must be a literal"
                row = VOCABULARY[node.args[0].value]
                given = {keyword.arg for keyword in node.keywords} - own
                assert given == set(row.args), f"{path}:{node.lineno}: {row.name} takes {set(row.args)}, not {given}"
                seen.setdefault(row.name, set()).add(path.parts[0])
    expected = {name: row.stage for name, row in VOCABULARY.items() if name != "run.start"}
    assert seen.keys() == expected.keys(), "the vocabulary holds events that nobody emits"
    assert not {name for name, stage in expected.items() if stage not in seen[name]}, "emitted, but not by its stage"


def test_trace_stays_pythons_own_module() -> None:
    assert not (ROOT / "trace" / "__init__.py").exists()
    code = "import trace, stagetrace; print(trace.Trace, stagetrace.trace.on)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "<class 'trace.Trace'> False"


HOSTED = re.compile(
    r"(?:github\.com|githubusercontent\.com|colab\.research\.google\.com|gitlab\.com|bitbucket\.org|huggingface\.co)[/:]+[\w./-]*",
    re.I,
)
OTHERS = ("github.com/guidance-ai/llguidance",)
"""Addresses of other projects that our texts point to. A new one is added here by somebody who looked at who owns it."""


def test_no_address_that_somebody_else_could_take() -> None:
    """The project has no address of its own: whoever registered one that stands here would run code on a reader's machine."""
    wrong = []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        text = (ROOT / name).read_bytes().decode("utf-8", "ignore") if (ROOT / name).is_file() else ""
        found = [address for address in HOSTED.findall(text) if not address.lower().startswith(OTHERS)]
        # the name on the package index is not ours
        found += re.findall(r"pip3? install [^\n`]*?['\" ]vllm-in-stages\b", text)
        wrong += [f"{name}: {address}" for address in found if name != "tests/test_house.py"]
    assert not wrong


def test_top_level_is_the_card() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    folders = {name.split("/")[0] for name in tracked if "/" in name}
    assert folders <= {*STAGES, "notebooks", "tests", "trace", ".ci", ".devcontainer", ".github"}
    files = {name for name in tracked if "/" not in name and not name.startswith(".")}
    assert files <= {
        "pyproject.toml",
        "README.md",
        "Makefile",
        "LICENSE",
        "constraints.txt",
        "AGENTS.md",
        "CHANGELOG.md",
        "CITATION.cff",
    }


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for path, tree in sources(*STAGES, "trace"):
        lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
        if lines > 500:
            too_long.append(f"{path}: {lines} lines")
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                compiled = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if length > (70 if compiled else 50):  # a kernel has many arguments, with a shape each
                    too_long.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not too_long


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], pytest.param(["mypy"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_style_and_types(command: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
