"""The adapters of exercise 17's server: the bundled one, and two that change the model by less, and the other way."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

from stage03_engine.model_path import BUNDLED_FOLDER

BUNDLED = BUNDLED_FOLDER / "gpt2-tiny-ship"
ALPHAS = {"ship": 8.0, "half": 4.0, "against": -3.0}
"""Name -> lora_alpha, by which what the adapter adds is multiplied."""


@functools.cache
def written() -> tempfile.TemporaryDirectory[str]:
    """The adapters, in a folder that goes with this process. Yours and the reference are served by one process, so that the two runs
    differ in nothing but the part."""
    folder = tempfile.TemporaryDirectory(prefix="stages-adapters-")
    config = json.loads((BUNDLED / "adapter_config.json").read_text(encoding="utf-8"))
    for name, alpha in ALPHAS.items():
        home = Path(folder.name, name)
        home.mkdir()
        shutil.copyfile(BUNDLED / "adapter_model.safetensors", home / "adapter_model.safetensors")
        (home / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}), encoding="utf-8")
    return folder


def flags(_: Path | None) -> list[str]:
    """Those that load them."""
    return ["--enable-lora", "--lora-modules", *(f"{name}={written().name}/{name}" for name in ALPHAS)]
