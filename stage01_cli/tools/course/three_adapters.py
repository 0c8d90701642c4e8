"""The adapters of exercise 17's server: the bundled one, and two that change the model by less, and the other way."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

from stage03_engine.model_path import BUNDLED_FOLDER

BUNDLED = BUNDLED_FOLDER / "gpt2-tiny-ship"
ALPHAS = {"ship": 8.0, "half": 4.0, "against": -3.0}
"""Name -> lora_alpha, by which what the adapter adds is multiplied."""


def flags(_: Path | None) -> list[str]:
    """Those that load them. Their folder is removed when this process ends."""
    home = Path(tempfile.mkdtemp(prefix="stages-adapters-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name, alpha in ALPHAS.items():
        shutil.copytree(BUNDLED, home / name)
        config = json.loads((BUNDLED / "adapter_config.json").read_text(encoding="utf-8"))
        (home / name / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}), encoding="utf-8")
    return ["--enable-lora", "--lora-modules", *(f"{name}={home / name}" for name in ALPHAS)]
