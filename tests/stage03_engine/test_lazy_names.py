"""Every lazy name leads somewhere: a table of texts is not checked by Python, nor by mypy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from stage03_engine.mixins import load
from stage03_engine.plugins import HOOKS, features
from stage03_engine.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent
LAZY = re.compile(r"stage0[1-4]_\w+(\.\w+)+:\w+")

ENDS_AS_ONE = re.compile(r":\w+[\"']")
"""What stands in every file with such a name: the others need not be parsed."""


def texts(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, those that are put together from a constant and a text (`_FEATURES + "x.flags:X"`) as one."""
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and isinstance(node.right, ast.Constant):
            yield f"{constants.get(node.left.id, '')}{node.right.value}"


def lazy_names() -> list[str]:
    """Every `module:attribute` that a stage writes down, or a manifest."""
    found = set()
    for path in ROOT.glob("stage0?_*/**/*.py"):
        code = path.read_text(encoding="utf-8")
        if ENDS_AS_ONE.search(code):
            found |= {text for text in texts(ast.parse(code)) if LAZY.fullmatch(text)}
    return sorted(found | {part.name for feature in features() for part in feature.parts})


def test_a_lazy_name_leads_to_something() -> None:
    assert [name for name in lazy_names() if load(name) is None] == []


def test_the_names_were_found() -> None:
    names = lazy_names()
    assert "stage03_engine.core.features.async_scheduling.async_core:AsyncEngineCore" in names, (
        "put together from two texts"
    )
    assert "stage02_server.features.tokenize.tokenize:install" in names, "from a manifest"
    hooks = {hook for seams in SamplingParams.HOOKS.values() for hook in seams.values()}
    assert hooks and hooks <= set(names)


def test_the_hooks_name_fields_that_exist() -> None:
    for field, seams in SamplingParams.HOOKS.items():
        assert field in SamplingParams.__struct_fields__
        assert all("parameters" in HOOKS[seam].by for seam in seams)
