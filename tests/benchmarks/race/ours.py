"""This project's engine: `LLM` without HTTP, and `python -m stage02_server serve`. Settings beside those below are
STAGES_* variables, as everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

from race.entrant import MODEL_NAME, OURS, PRECISIONS, ROOT, Command, Entrant, Setup
from race.worker import Settings, serve
from race.workloads import Generate

NUMBERS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}  # fmt: skip
"""Precision -> the settings that ask for it."""


def find(setup: Setup) -> list[Entrant]:
    """One per precision."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "trace", ROOT / "tests/benchmarks")))
    env = {"PYTHONPATH": paths}

    def offline(precision: str) -> Command:
        settings = setup.settings(setup.checkpoint, precision)
        return Command([sys.executable, "-m", "race.ours", *settings.argv()], env)

    def server(precision: str, port: int) -> Command:
        engine = _engine_args(setup.settings(setup.checkpoint, precision))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
        here = ["--host=127.0.0.1", f"--port={port}", f"--served-model-name={MODEL_NAME}"]
        quiet = "--disable-uvicorn-access-log"
        argv = [sys.executable, "-m", "stage02_server", "serve", str(setup.checkpoint), *flags, *here, quiet]
        return Command(argv, env)

    version = _commit()
    return [Entrant(OURS, version, each, each, offline(each), partial(server, each)) for each in PRECISIONS]


def start(settings: Settings) -> Generate:
    """Runs in the engine's own process."""
    from stage03_engine.llm import LLM
    from stage03_engine.sampling_params import SamplingParams

    llm = LLM(settings.model, **_engine_args(settings))

    def generate(prompts: list[list[int]], output: int, shared: int) -> list[list[int]]:
        """The prefix cache finds what is shared by itself."""
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]

    return generate


def _engine_args(settings: Settings) -> dict[str, Any]:
    scale = settings.scale
    return {
        "max_model_len": scale.positions, "max_num_seqs": scale.slots, "num_threads": settings.threads,
        "kv_cache_memory_bytes": scale.kv_cache_bytes, **NUMBERS[settings.dtype],
    }  # fmt: skip


def _commit() -> str:
    """Of this checkout; empty where there is none."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    serve(start)
