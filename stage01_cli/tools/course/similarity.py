"""Which submission looks like which: fingerprints of the shape of their code, so that other names, comments and line breaks make no
difference. A number for a teacher to look at, and no judgement: short exercises look alike.

Source: Schleimer, Wilkerson, Aiken, "Winnowing: Local Algorithms for Document Fingerprinting" (2003).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path

from stage01_cli.tools.course.exercises import ROOT, Exercise, parsed
from stage01_cli.tools.course.own import references

GRAM = 14  # nodes of the syntax tree in a row
WINDOW = 8  # of so many grams in a row, at least one is kept
FEWEST = 12  # fingerprints beyond the starter's; with fewer nothing is said
REFERENCE = "the reference"


def shape(tree: ast.AST) -> list[str]:
    """The kinds of the nodes in the order of the text, without docstrings."""
    found, ahead = list[str](), [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.expr_context) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        found.append(type(node).__name__)
        ahead += reversed(list(ast.iter_child_nodes(node)))
    return found


def fingerprints(trees: Iterable[ast.AST]) -> set[int]:
    """The smallest hash of each window."""
    found = set[int]()
    for tree in trees:
        kinds = shape(tree)
        grams = [" ".join(kinds[i : i + GRAM]) for i in range(len(kinds) - GRAM + 1)]
        hashes = [int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big") for gram in grams]
        found |= {min(hashes[i : i + WINDOW]) for i in range(max(1, len(hashes) - WINDOW + 1)) if hashes}
    return found


def of_reference(exercise: Exercise) -> list[ast.AST]:
    """The modules that have what the starter leaves open, with their helpers."""
    return [parsed((ROOT / f"{module.replace('.', '/')}.py").read_bytes()) for module in references(exercise)]


def alike(exercise: Exercise, files: dict[str, Path]) -> dict[str, str]:
    """Student -> whom the file resembles most, and by how much: "83 % like bob". A share is of the smaller of the two, without what the
    starter gives. Files that cannot be read as Python have no shape, and are left out."""
    given = fingerprints([parsed(exercise.starter.read_bytes())])
    prints = {REFERENCE: fingerprints(of_reference(exercise))}
    for student, path in files.items():
        try:
            prints[student] = fingerprints([parsed(path.read_bytes())]) - given
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    found = {}
    for student, own in prints.items():
        shares = [
            (round(100 * len(own & other) / min(len(own), len(other))), name)
            for name, other in prints.items()
            if name != student and min(len(own), len(other)) >= FEWEST
        ]
        if student != REFERENCE and shares:
            share, name = max(shares)
            found[student] = f"{share} % like {name}"
    return found
