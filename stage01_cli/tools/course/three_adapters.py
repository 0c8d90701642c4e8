"""The adapters of exercise 17's server: the bundled one, and two that change the model by less, and the other way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from stage01_cli.tools.course.exercises import WORK
from stage03_engine.model_path import BUNDLED_FOLDER

BUNDLED = BUNDLED_FOLDER / "gpt2-tiny-ship"
ALPHAS = {"ship": 8.0, "half": 4.0, "against": -3.0}
"""Name -> lora_alpha, by which what the adapter adds is multiplied."""


def flags(_: Path | None) -> list[str]:
    """Those that load them. They lie in the same folder for every run, so that two runs differ in nothing but the part."""
    home = WORK / "adapters"
    for name, alpha in ALPHAS.items():
        (home / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(BUNDLED / "adapter_model.safetensors", half_written := home / name / f".{os.getpid()}")
        os.replace(half_written, home / name / "adapter_model.safetensors")
        config = json.loads((BUNDLED / "adapter_config.json").read_text(encoding="utf-8"))
        half_written.write_text(json.dumps(config | {"lora_alpha": alpha}), encoding="utf-8")
        os.replace(half_written, home / name / "adapter_config.json")
    return ["--enable-lora", "--lora-modules", *(f"{name}={home / name}" for name in ALPHAS)]
