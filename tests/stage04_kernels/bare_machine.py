"""Run `python -m stage04_kernels` as on a machine that has torch, Triton and numpy, and nothing else of this project: every other
installed package, and the trace, cannot be imported. A program, not a module: `python bare_machine.py check --only triton`.
"""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OF_TORCH = {
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "setuptools",
}
THERE = {"torch", "torchgen", "functorch", "triton", "numpy", "stage04_kernels"} | OF_TORCH


class Bare(PathFinder):
    """Finds what the standard library has, and what is there."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As usual, unless it is installed and not named above."""
        spec = super().find_spec(fullname, path, target)  # type: ignore[arg-type]
        name = fullname.partition(".")[0]
        origin = str(spec.origin or "") if spec else ""
        mine = "site-packages" in origin or origin.startswith(str(ROOT)) or name == "stagetrace"
        return None if mine and name not in THERE else spec


sys.path[0] = str(ROOT)
sys.meta_path = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__ + repr(finder)]
sys.argv[0] = "stage04_kernels"
runpy.run_module("stage04_kernels", run_name="__main__", alter_sys=True)
